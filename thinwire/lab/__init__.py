"""The lab: a slow network on one Linux machine, without root, and programs measured on it from outside."""

from thinwire.lab.errors import DeadLink, LabError, LabTimeout, RankFailed, Unavailable
from thinwire.lab.job import Job, Results
from thinwire.lab.netlink import Traffic
from thinwire.lab.network import Network
from thinwire.lab.probe import Finding, check

__all__ = [
    "DeadLink",
    "Finding",
    "Job",
    "LabError",
    "LabTimeout",
    "Network",
    "RankFailed",
    "Results",
    "Traffic",
    "Unavailable",
    "check",
]
