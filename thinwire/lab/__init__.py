"""The lab: a slow network on one Linux machine, without root, and programs run on it, measured from outside."""

from thinwire.lab.errors import LabError, LabTimeout, RankFailed, Unavailable
from thinwire.lab.job import Job, Results
from thinwire.lab.netlink import Traffic
from thinwire.lab.network import Network

__all__ = ["Job", "LabError", "LabTimeout", "Network", "RankFailed", "Results", "Traffic", "Unavailable"]
