"""What can go wrong in a lab: it cannot be had here, a rank failed, time ran out."""

from __future__ import annotations

from thinwire.errors import UsageError


class Unavailable(UsageError):
    """This machine does not let us make a network; the message says why and what would help."""


class LabError(RuntimeError):
    """The lab itself, or a program in it, failed."""


class RankFailed(LabError):
    """A rank ended badly, and the others were stopped. `output` is the last it said."""

    def __init__(self, rank: int, host: str, status: int, output: list[str]) -> None:
        self.rank, self.host, self.status, self.output = rank, host, status, output
        said = "\n".join(f"  {line}" for line in output) or "  (it said nothing)"
        super().__init__(f"rank {rank} on {host} {describe(status)}; its last output:\n{said}")


class DeadLink(LabError):
    """A host lost a connection for want of an answer, the ranks went on waiting, and were stopped."""

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"a link is dead: TCP on {host} had no answer and gave a connection up; "
            "the ranks went on waiting and were stopped"
        )


class LabTimeout(LabError):
    """The program was still running when its time was up, and was stopped."""


def describe(status: int) -> str:
    """A process status in words; negative means a signal, as in `subprocess`."""
    return f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
