"""Rates, times, sizes and fractions as people write them ("100mbit", "10ms", "10MB", "0.5%"), read and written."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from thinwire.errors import UsageError

# Bits per second. Decimal, as networks are sold; "MB/s" style units are refused rather than guessed.
RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTE_UNITS = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
SLOWEST = 1e4  # bit/s; on a slower link one packet takes over a second
FASTEST = 1e11  # bit/s; no CPU forwards more
UNLIMITED = "unlimited"
# Student's t for a two-sided 95 % interval, by degrees of freedom; beyond these three terms of its series will do
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def parse_rate(text: str | float | None, what: str = "rate") -> float | None:
    """Bits per second from "100mbit" (or a number of bits per second); None where `text` is None or "unlimited".

    what: how errors name the value."""
    if text is None or text == UNLIMITED:
        return None
    value = float(text) if _is_number(text) else _parse(str(text), RATE_UNITS, what)
    if not SLOWEST <= value <= FASTEST:
        raise UsageError(f"{what} {text!r}: allowed is 10kbit to 100gbit, or unlimited")
    return value


def parse_time(text: str | float, what: str = "time") -> float:
    """Seconds from "10ms" (or a number of seconds); `what`: how errors name the value."""
    if _is_number(text):
        return _not_negative(float(text), text, what)
    if re.fullmatch(r"0+(\.0+)?", str(text).strip()):
        return 0.0
    return _not_negative(_parse(str(text), TIME_UNITS, what), text, what)


def parse_loss(text: str | float, what: str = "loss") -> float:
    """A probability from "0.5%" (or a number between 0 and 1); `what`: how errors name the value."""
    try:
        value = float(text[:-1]) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"{what} {text!r}: write a percentage such as 0.5%, or a fraction such as 0.005") from None
    if not 0 <= value < 1:
        raise UsageError(f"{what} {text!r}: allowed is 0% up to, not including, 100%")
    return value


def parse_bytes(text: str | int, what: str = "size") -> int:
    """A whole number of bytes from "10MB" (or a number of bytes), decimal as `show_bytes` writes it.

    what: how errors name the value."""
    if isinstance(text, int) and not isinstance(text, bool):
        return round(_not_negative(text, text, what))
    return round(_parse(str(text), BYTE_UNITS, what))


def show_rate(rate: float | None) -> str:
    """A rate in bit/s to three digits, in a form that `parse_rate` reads: 1.16mbit."""
    if rate is None:
        return UNLIMITED
    rate = float(f"{rate:.3g}")
    unit = next((u for u in ("gbit", "mbit", "kbit") if rate >= RATE_UNITS[u]), "bit")
    return f"{rate / RATE_UNITS[unit]:g}{unit}"


def show_bytes(count: float) -> str:
    """A number of bytes in decimal units, as rates are in decimal bits: 1.50 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def show_duration(seconds: float) -> str:
    """A number of seconds in at most two units: 9.8 s, 4 min 10 s, 2 h 05 min."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _is_number(text: str | float) -> bool:
    return isinstance(text, int | float) and not isinstance(text, bool)


def _parse(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z/]+)", text.strip())
    if match is None or match[2].lower() not in units:
        shown = "B, kB, MB, GB" if units is BYTE_UNITS else ", ".join(units)
        raise UsageError(f"{what} {text!r}: write a number and one of the units {shown}")
    return float(match[1]) * units[match[2].lower()]


def _not_negative(value: float, text: object, what: str) -> float:
    if not 0 <= value < float("inf"):
        raise UsageError(f"{what} {text!r}: must be zero or more")
    return value


def half_interval(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean of `values`: what stands behind every ± here. None of fewer than two."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    t = T95.get(freedom, 1.96 + 2.372 / freedom + 2.823 / freedom**2)
    return t * statistics.stdev(values) / len(values) ** 0.5
