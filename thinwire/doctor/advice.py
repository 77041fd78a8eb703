"""What to set on the machines at the ends of a long link, from what was measured; nothing is set here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.doctor.flows import LongLink
from thinwire.planner.flows import MOST, choose_streams, one_flow
from thinwire.quantities import show_bytes, show_rate

LONG = 0.020  # seconds there and back: 10 ms one way, from where on waiting is worth a word
ROOM = 0.62  # of tcp_wmem's limit that is data: measured, the rest is the kernel's bookkeeping (planner/flows.py)
_FOLDER = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class LocalTcp:
    """Settings of this machine's TCP; names as of the kernel's."""

    congestion: str
    available: tuple[str, ...]
    slow_start_after_idle: bool
    rmem: int  # the largest, in bytes
    wmem: int

    @property
    def window(self) -> float:
        """Bytes that one flow may have under way."""
        return ROOM * min(self.rmem, self.wmem)


def local_tcp() -> LocalTcp | None:
    """This machine's settings; None where it is no Linux."""
    if not _FOLDER.exists():
        return None
    words = {name: (_FOLDER / f"tcp_{name}").read_text().split() for name in (
        "congestion_control", "available_congestion_control", "slow_start_after_idle", "rmem", "wmem",
    )}  # fmt: skip
    return LocalTcp(
        congestion=words["congestion_control"][0],
        available=tuple(words["available_congestion_control"]),
        slow_start_after_idle=words["slow_start_after_idle"] != ["0"],
        rmem=int(words["rmem"][-1]),
        wmem=int(words["wmem"][-1]),
    )


def advise(link: LongLink, tcp: LocalTcp | None) -> list[str]:
    """Lines for whoever sets the machines up: what was seen, then what to set, the most useful first.

    tcp: this machine's settings; None: not known, so only what was seen is told.
    """
    again = "" if link.loss is None else f", {100 * link.loss:.2g} % of packets sent again"
    seen = (
        f"a long link ({1e3 * link.round_trip:.0f} ms there and back{again}): one flow carried {show_rate(link.one)}, "
        f"{show_rate(link.one_both)} both ways at once; {link.streams} flows {show_rate(link.many)}, "
        f"{show_rate(link.many_both)} both ways at once"
    )
    if tcp is None:
        return [seen]
    return [seen, *_idle(tcp), *_window(link, tcp), *_loss(link, tcp), *_streams(link, tcp)]


def _idle(tcp: LocalTcp) -> list[str]:
    if not tcp.slow_start_after_idle:
        return []
    return [
        "first, on both machines: sysctl -w net.ipv4.tcp_slow_start_after_idle=0 (a connection that was silent for a "
        "moment, as between two steps, goes on at the speed it had)"
    ]


def _window(link: LongLink, tcp: LocalTcp) -> list[str]:
    under_way = link.fastest * link.round_trip / 8
    if under_way <= tcp.window:
        return []
    most = round(2 * under_way / ROOM)
    return [
        f"at this rate {show_bytes(under_way)} are under way, and one flow may have {show_bytes(tcp.window)}; on both "
        f"machines: sysctl -w net.ipv4.tcp_rmem='4096 131072 {most}' net.ipv4.tcp_wmem='4096 16384 {most}'"
    ]


def _loss(link: LongLink, tcp: LocalTcp) -> list[str]:
    if not link.loss or tcp.congestion == "bbr":
        return []
    alone = one_flow(link.round_trip, link.loss, tcp.congestion, tcp.window)
    if alone > link.fastest:
        return []
    load = "" if "bbr" in tcp.available else "modprobe tcp_bbr; "
    return [
        f"at this loss one flow under {tcp.congestion} carries about {show_rate(alone)} (1.22·MSS/(RTT·√loss)), "
        f"whatever the link; BBR does not take loss for congestion. On both machines: {load}sysctl -w "
        "net.ipv4.tcp_congestion_control=bbr, and measure again: both ways at once it may lose what it gains"
    ]


def _streams(link: LongLink, tcp: LocalTcp) -> list[str]:
    count = choose_streams(link.fastest, link.round_trip, link.loss or 0.0, tcp.congestion, tcp.window)
    if count == 1:
        return []
    alone = one_flow(link.round_trip, link.loss or 0.0, tcp.congestion, tcp.window)
    most = " (the most that are worth it)" if count == MOST else ""
    return [
        f"or without root, in run.toml: [wire] streams = {count}{most}, which carry about "
        f"{show_rate(min(link.fastest, count * alone))} together as the machines are set now"
    ]
