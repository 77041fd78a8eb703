"""The step that passes belong to: what they wrote to state is kept or dropped as a whole, on all ranks or on none.

Without a bracket a pass is a step, and the agreement at its end decides. In a bracket ranks tell each other, before
every pass and at the end, what they are about to do: begin a pass, end the step, or give it up since an exception was
raised on this rank. As soon as one gives up, all drop the step, and nothing more of it is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.base import is_finite
from thinwire.collectives.members import Members
from thinwire.collectives.messages import maximum
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.quorum import Following
from thinwire.errors import InvalidExchange

MOST_UNREAD = 64  # flags of plain passes that may wait to be read
BEGINS, ENDS, GIVES_UP = (1, 0, 0), (0, 1, 0), (0, 0, 1)  # a pass begins, the step ends, this rank gives the step up


class StepState:
    """Where the step stands: its state is committed or rolled back after one pass, or after a bracket of several.

    exchange: whose state it is. agreeing: the process groups over which a step counts or does not. device: where flags
    are sent from. quorum: that the exchange follows, whose vote decides; None: the group's members stay.
    """

    def __init__(
        self, exchange: Exchange, agreeing: tuple[dist.ProcessGroup | Members, ...], device: torch.device,
        quorum: Following | None = None,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.quorum = quorum
        self.agreeing = agreeing
        self.device = device
        self.opened = False  # a pass has begun since the last commit or rollback
        self.failed = False  # it will be rolled back
        self.bracketed = False  # it ends with its bracket and not with its pass
        self.dropped = False  # all ranks know that one has given up the bracketed step: nothing more is exchanged
        self._skipped = False  # the last step will be or was rolled back
        self._skips = 0
        self._unread: list[Tensor] = []  # 0-d "was finite" of the last passes: to read one is to wait for its device

    @property
    def skipped(self) -> bool:
        """Was the last step rolled back, or will this one be?"""
        self._read_flags()
        return self._skipped or (self.quorum is not None and not self.quorum.group.counted)

    @property
    def skips(self) -> int:
        """How many steps were?"""
        self._read_flags()
        return self._skips

    def maximum(self, values: Tensor) -> Tensor:
        """Entry by entry over all ranks on which a step counts or does not."""
        for group in self.agreeing:
            values = maximum(values, group)
        return values

    def agree(self, flags: Tensor) -> Tensor:
        """uint8[…]: the maximum of every flag; the first is also set where a message was damaged on its way."""
        agreed = self.exchange.agree(flags)
        for group in self.agreeing[self.exchange.size > 1 :]:  # the shards
            agreed = maximum(agreed, group)
        return agreed

    # --- passes

    def open(self) -> None:
        """A pass begins."""
        if not self.opened:
            self.opened = True
            self.failed = False

    def end_pass(self, skipped: bool) -> None:
        """A pass is through on all ranks; `skipped`: the step must be rolled back."""
        self._skip(skipped)
        if not self.bracketed:
            self.close()

    def end_plain_pass(self, means: Sequence[Tensor], fill: float) -> None:
        """A pass went past the exchange, through the backend's all-reduce, and is a step of its own. Where its means
        are not finite it is skipped.

        means: all of them, with the same bits on all ranks, so that all find the same. They become `fill` where the
        step is skipped. On a card nothing is waited for: `skipped` reads the flag when it is asked.
        """
        finite = torch.stack([is_finite(mean) for mean in means]).all()
        if finite.is_cuda or not bool(finite):
            for mean in means:
                mean.masked_fill_(~finite, fill)
        if len(self._unread) == MOST_UNREAD:
            self._read_flags()
        self._unread.append(finite)
        self.exchange.count_step()

    def close(self) -> None:
        """Commit or roll back what the passes wrote, if there was any; in a quorum its vote does."""
        if self.opened and self.quorum is not None:
            if self.failed:
                self.quorum.group.report(InvalidExchange("values were not finite, or the step was given up"))
            self.quorum.group.stage(self._settle)
            return
        if self.opened and self.failed:
            self.exchange.rollback()
        elif self.opened:
            self.exchange.commit()
        self.opened = False

    def _settle(self, counts: bool) -> None:
        """The quorum has voted."""
        assert self.quorum is not None
        self._skip(not counts)
        self.quorum.settle(counts)
        self.opened = False

    @contextmanager
    def losses(self) -> Iterator[None]:
        """Inside other ranks are waited for. In a quorum a lost one is reported, and nothing more of the step is
        exchanged; else it is an error."""
        try:
            yield
        except RuntimeError as error:
            if self.quorum is None:
                raise
            self.quorum.group.report(error)
            self.dropped = True

    def follow(self) -> None:
        """Before a pass: the members of now. On the communication thread."""
        if self.quorum is not None and not self.opened:
            self.dropped = False
            with self.losses():
                self.quorum.follow()

    # --- brackets

    @contextmanager
    def bracket(self) -> Iterator[None]:
        """Passes inside are one step; an exception rolls it back."""
        if self.bracketed:
            raise RuntimeError("a step is open already")
        self._read_flags()
        self._skipped = False
        self.failed = False
        self.bracketed = True
        try:
            yield
        except BaseException:
            self.failed = True
            raise
        finally:
            self.bracketed = False
            if self.dropped and not self.opened:
                self.exchange.count_step()  # as on the ranks that had begun a pass
            self.dropped = False
            self.close()

    def announce_pass(self) -> None:
        """On the communication thread, before the first unit of a pass."""
        self._announce(BEGINS)

    def announce_end(self, gives_up: bool) -> None:
        """On the communication thread, after the last pass; gives_up: an exception was raised on this rank."""
        self._announce(GIVES_UP if gives_up else ENDS)

    def _announce(self, mine: tuple[int, int, int]) -> None:
        if self.dropped or not self.agreeing:
            return
        flags = torch.tensor(mine, dtype=torch.uint8).to(self.device)
        begins = ends = gives_up = 0
        with self.losses():
            begins, ends, gives_up = self.maximum(flags).tolist()
        if gives_up or self.dropped:
            self.dropped = True
            self._skip(True)
        elif begins and ends:
            raise RuntimeError("a bracketed step ends on some ranks while others begin a pass: all must make as many")

    # --- inside

    def _skip(self, skipped: bool) -> None:
        self._read_flags()
        self._skips += skipped and not self.failed  # once per step
        self.failed |= skipped
        self._skipped = self.failed

    def _read_flags(self) -> None:
        if self._unread:
            finite = torch.stack(self._unread).tolist()
            self._unread.clear()
            self._skipped = not finite[-1]
            self._skips += finite.count(False)
