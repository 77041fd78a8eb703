"""What the lab can do on this machine: found by trying, for `thinwire doctor`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from thinwire.lab.errors import LabError, Unavailable
from thinwire.lab.network import Network


@dataclass(frozen=True)
class Finding:
    """One line of `thinwire doctor`: what was tried, whether it works, how (or why not), the remedy."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = False  # thinwire cannot work without it


def check() -> list[Finding]:
    """Make two small networks, one of them with latency, run a program on each, and return what worked."""
    network = _try("lab: shaped links", latency=0.0)
    if not network.ok:
        return [network]
    return [network, _try("lab: latency and loss", latency=0.001)]


def _try(name: str, latency: float) -> Finding:
    try:
        with Network(hosts=2, rate="100mbit", latency=latency) as net:
            net.run([sys.executable, "-c", ""], timeout=30.0, echo=False)
            how = f"by {net.delay}" if net.delay == "netem" else f"in {net.delay} (this kernel has no netem)"
            detail = how if latency else "user namespaces, veth, bridge and token bucket work"
            return Finding(name, True, "; ".join([detail, *net.notes]))
    except Unavailable as error:
        reason, _, remedy = str(error).partition("; ")
        return Finding(name, False, reason, remedy)
    except LabError as error:
        return Finding(name, False, str(error))
