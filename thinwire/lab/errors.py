"""What can go wrong in a lab: the machine forbids it, a rank failed, time ran out."""

from __future__ import annotations

from thinwire.errors import UsageError


class Unavailable(UsageError):
    """This machine does not allow a network to be made; the message gives the reason and a remedy."""


class LabError(RuntimeError):
    """The lab itself, or a program in it, failed."""


class RankFailed(LabError):
    """A rank failed, and the others were stopped.

    rank, host: which one, and the label of its host.
    status: its exit status; negative: the signal that killed it.
    output: the last lines it printed.
    """

    def __init__(self, rank: int, host: str, status: int, output: list[str]) -> None:
        self.rank = rank
        self.host = host
        self.status = status
        self.output = output
        lines = "\n".join(f"  {line}" for line in output) or "  (it printed nothing)"
        super().__init__(f"rank {rank} on {host} {describe(status)}; its last output:\n{lines}")


class DeadLink(LabError):
    """TCP on `host` gave a connection up because no answer came; the ranks went on waiting and were stopped."""

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
