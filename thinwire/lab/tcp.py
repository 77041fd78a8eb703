"""TCP's settings in the hosts: congestion control, windows, slow start after idling, and patience with a dead link."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError

CONGESTION = ("reno", "cubic")  # congestion control unless told: the last that can be set; reno always can
WINDOWS = (65_536, 1 << 30)  # bytes: what is allowed
_FOLDER = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Tcp:
    """What TCP in every host is told, beside its defaults.

    congestion: the congestion control's name; None: cubic where the machine lets the lab set it, else reno.
    window: bytes that one connection may have under way at most; None: what the kernel has chosen.
    slow_start_after_idle: whether a connection that has been silent for a while starts slowly again, as Linux does.
    """

    congestion: str | None = None
    window: int | None = None
    slow_start_after_idle: bool = True

    def __post_init__(self) -> None:
        if self.congestion is not None and not (isinstance(self.congestion, str) and self.congestion):
            raise UsageError(f"congestion {self.congestion!r}: allowed is a name such as reno, cubic or bbr")
        low, high = WINDOWS
        if self.window is not None and not low <= self.window <= high:
            raise UsageError(f"window {self.window!r}: allowed is {low} bytes to {high}")
        if not isinstance(self.slow_start_after_idle, bool):
            raise UsageError(f"slow_start_after_idle {self.slow_start_after_idle!r}: allowed is true or false")


DEFAULT = Tcp()


def apply(tcp: Tcp, patience: float) -> list[str]:
    """Set up the host whose namespace this process is in; notes on what could not be done.

    patience: seconds of unanswered retries after which TCP reports a dead link.
    """
    if tcp.window is not None:
        for name in ("tcp_rmem", "tcp_wmem"):
            least, usual, _ = (_FOLDER / name).read_text().split()
            # Twice the window: half of the kernel's count is its own bookkeeping of packets.
            (_FOLDER / name).write_text(f"{least} {usual} {2 * tcp.window}")
    if not tcp.slow_start_after_idle:
        (_FOLDER / "tcp_slow_start_after_idle").write_text("0")
    return [*_choose_congestion_control(tcp.congestion), *_give_up_after(patience)]


def _choose_congestion_control(name: str | None) -> list[str]:
    """The same on every machine that runs a lab, unless told.

    A machine may be set to BBR, under which two hosts that send to each other over a slow link at once get half
    of it and less, at random (docs/log.md): what is measured would be the machine's setting.
    """
    setting = _FOLDER / "tcp_congestion_control"
    for choice in CONGESTION if name is None else (name,):
        with suppress(OSError):
            setting.write_text(choice)
    chosen = setting.read_text().strip()
    if name is not None and chosen != name:
        raise UsageError(f"congestion {name!r}: {_choices()}")
    return [] if name is not None or chosen in CONGESTION else ["TCP's congestion control cannot be set: the machine's"]


def _choices() -> str:
    """What a host may use, and what it might if the machine allowed it."""
    allowed = (_FOLDER / "tcp_allowed_congestion_control").read_text().split()
    known = (_FOLDER / "tcp_available_congestion_control").read_text().split()
    others = [name for name in known if name not in allowed]
    more = f"; for {', '.join(others)} as root: sysctl -w net.ipv4.tcp_allowed_congestion_control='{' '.join(known)}'"
    return f"this machine allows {', '.join(allowed)}{more if others else ''}"


def _give_up_after(seconds: float) -> list[str]:
    """TCP reports a dead link after about `seconds`.

    The kernel's rule: it gives up after r doublings of a 0.2 s time-out, after 0.2 (2^(r+1) − 1) seconds.
    """
    retries = next(r for r in range(1, 16) if 0.2 * (2 ** (r + 1) - 1) >= seconds or r == 15)
    try:
        (_FOLDER / "tcp_retries2").write_text(str(retries))
    except OSError as error:
        return [f"tcp_retries2 cannot be set ({error.strerror}): a dead link shows after some 15 minutes"]
    return []
