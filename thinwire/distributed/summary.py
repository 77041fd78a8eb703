"""What compression has saved so far: bytes sent by this rank beside those that would have been sent without it."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.quantities import show_bytes

ALIKE = 0.05  # a ratio this close to 1 is neither fewer nor more


@dataclass(frozen=True)
class Summary:
    """What `handle.summary()` returns; `print(handle.summary())` is one line.

    steps: since this handle was made, steps that were rolled back included, and evaluations of a pipeline; steps that
    a checkpoint was loaded with are not.
    sent: payload bytes that this rank has sent in them.
    would_have_sent: for data parallel what a ring all-reduce in fp32 sends, 2(P−1)/P · 4 bytes per value; for a
    pipeline what its tensors take uncompressed.
    skips: steps that were rolled back.
    """

    steps: int
    sent: int
    would_have_sent: int
    skips: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 where nothing was."""
        return self.would_have_sent / self.sent if self.sent else 1.0

    @property
    def sent_per_step(self) -> float:
        return self.sent / self.steps if self.steps else 0.0

    @property
    def would_have_sent_per_step(self) -> float:
        return self.would_have_sent / self.steps if self.steps else 0.0

    def metrics(self) -> dict[str, float]:
        """For a trainer's log, by names that stand beside other metrics."""
        return {
            "thinwire_mb_per_step": round(self.sent_per_step / 1e6, 6),
            "thinwire_ratio": round(self.ratio, 3),
            "thinwire_skips": self.skips,
        }

    def __str__(self) -> str:
        skipped = f", {self.skips} rolled back" if self.skips else ""
        counted = f"({self.steps} {'step' if self.steps == 1 else 'steps'}{skipped})"
        if not self.sent:
            return f"nothing sent {counted}"
        sizes = f"{show_bytes(self.sent_per_step)} per step instead of {show_bytes(self.would_have_sent_per_step)}"
        return f"{sizes}: {_verdict(self.ratio)} {counted}"


def _verdict(ratio: float) -> str:
    if abs(ratio - 1) < ALIKE:
        return "as much as without compression"
    return f"{ratio:.1f}× fewer" if ratio > 1 else f"{1 / ratio:.1f}× more"
