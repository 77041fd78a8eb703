"""A tied embedding by rows: the last stage owns the weight, the first has only the rows of its batch's tokens.

Of V rows a batch uses k. The owner sends these down, and gets their gradients back, which it adds to its own before
anything is averaged, clipped or stepped: tied training up to the order of addition, in 2·k·d values instead of 2·V·d.

    first                                    owner
    announce   ids, a bitmap of V bits   →   announce       only where the owner does not know the batch
    begin      posts its receive             begin          posts its receive; rows [k, d]  →
    fetch      ←                             fetch          nothing
    … forward and backward …
    send_gradients   [k, d]   →              add_gradients
    commit or rollback                       the same, after which its optimiser steps

With a codec rows go down as coded changes against what both ends remember of them (rule.py, Delta), and gradients go up
coded. A message that arrives damaged counts as NaN, so that the step is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.codecs.base import Codec, raw_bytes
from thinwire.codecs.exact import Identity
from thinwire.collectives.groups import Group
from thinwire.data_parallel.tied_embedding import RowEmbedding
from thinwire.distributed.config_check import check_agreement, describe
from thinwire.distributed.pair import Message, Pair
from thinwire.errors import UsageError
from thinwire.kernels.checksum import checksum
from thinwire.memory import Delta
from thinwire.memory.channel import Channel

OWNER = 1  # its rank in the pair
WHAT = "a tied embedding by rows"
IDS, ROWS, GRADIENTS, LENT = 1, 2, 3, 4  # tags
logger = logging.getLogger("thinwire.tied")


class TiedRows:
    """One end of a tied embedding whose rows travel. Made at both ends, with equal arguments but the first.

        embedding = tw.parallel.RowEmbedding(model.embed)               # first stage, in place of model.embed
        rows = tw.parallel.TiedRows(embedding, pair)                    # last stage: TiedRows(head.weight, pair)
        rows.announce(batch); rows.begin(); rows.fetch()                # last stage: announce() without ids
        schedule.step(…); rows.send_gradients(); rows.add_gradients()   # each does nothing at the other end
        rows.commit(); optimizer.step()                                 # the owner's has the weight

    end: the first stage's RowEmbedding, or the owner's weight.
    pair: the process group of both ends: the first stage's rank, then the owner's.
    codec: of changes and gradients; None: they are exact.
    seed: of stochastic rounding.
    tell: do ids travel? False: both ends give `announce` the same ids.

    Both ends call the same methods in the same order. UsageError where the pair is not one, or codecs differ.
    """

    def __init__(
        self, end: RowEmbedding | nn.Parameter, pair: Group, *, codec: Codec | None = None, seed: int = 0,
        tell: bool = True,
    ) -> None:  # fmt: skip
        self.pair = Pair(pair, WHAT)
        self.first = end if isinstance(end, RowEmbedding) else None
        self.weight = end if isinstance(end, nn.Parameter) else None
        if (self.first is None) != (self.pair.rank == 1):
            raise UsageError(f"{WHAT}: the pair is the first stage's rank, then the last stage's")
        check_agreement(WHAT, describe(codec, "codec"), self.pair.group)
        start = end.detach() if isinstance(end, nn.Parameter) else end.weight.detach()
        self.vocabulary, self.width = (end.vocabulary, end.width) if isinstance(end, RowEmbedding) else end.shape
        self.dtype = start.dtype
        self.device = start.device
        self.tell = tell
        memory = Delta("native", gate=False) if codec else None
        self.down = Channel(codec or Identity(), memory, seed=seed, name="rows of a tied embedding")
        self.up = Channel(codec or Identity(), seed=seed, name="gradients of a tied embedding's rows")
        self.step = 0
        self.is_open = False
        self.upcoming: Tensor | Message | None = None
        self.ids = torch.zeros(0, dtype=torch.int64)  # of the open step, sorted
        self.key = ""  # of its messages
        self.moved: Tensor | None = None  # its mirrors [k, d], once it is committed
        self.arriving: Message | None = None
        self.sending: list[Message] = []
        self.posted = 0  # bytes of the open step; they are counted when its gradients travel, as part of that step
        self.sent = 0
        self.mirror: Tensor | None = None  # [V, d]: with a codec, what both ends remember of every row
        if codec is not None:
            self.mirror = start.to(torch.promote_types(self.dtype, torch.float32), copy=True)
            self._align()

    # --- a step

    def announce(self, ids: Tensor | None = None) -> None:
        """The tokens of the next step, any number of times each; may be called while a step is open.

        ids: any shape. At the owner None, unless ids do not travel.
        """
        self.upcoming = self._tell(ids)

    def begin(self) -> None:
        """Open a step with the announced rows: the owner sends them, as they are now."""
        if self.is_open or self.upcoming is None:
            raise RuntimeError("a step is open already" if self.is_open else "no rows have been announced")
        self.ids = self._told(self.upcoming)
        self.upcoming = None
        self.is_open = True
        self.step += 1
        self.down.begin(self.step)
        self.up.begin(self.step)
        self.key = f"{self.step} {_digest(self.ids)}"
        if self.mirror is not None:
            known = self.mirror[self.ids.to(self.device)]
            self.key += f" {_digest(known)}"  # ends that remember different rows do not understand each other
            self.down.state.write("h", self.key, known)
        if self.weight is None:
            self.arriving = self.pair.receive(self.down.nbytes(self.key, self._rows, self.dtype), ROWS)
        else:
            self.arriving = self.pair.receive(self.up.nbytes(self.key, self._rows, self.dtype), GRADIENTS)
            values = self.weight.detach()[self.ids.to(self.device)]
            self._post(self.pair.send(self.down.send(self.key, values, nonfinite="flag"), ROWS))
            self._remember()

    def fetch(self) -> None:
        """At the first stage: wait for the step's rows."""
        if self.first is not None:
            self.first.put(self.ids, self._read(self.down))
            self._remember()

    def send_gradients(self) -> None:
        """At the first stage: the gradients of the rows are complete."""
        if self.first is not None:
            weight = self.first.weight
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._post(self.pair.send(self.up.send(self.key, gradient, nonfinite="flag"), GRADIENTS))
            self._count_sent()

    def add_gradients(self) -> None:
        """At the owner: wait for them, and add them to the weight's gradient."""
        if self.weight is not None:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            self.weight.grad.index_add_(0, self.ids.to(self.device), self._read(self.up))
            self._count_sent()

    def commit(self) -> None:
        """The step counts: both ends remember its rows."""
        self._end_step()
        self.down.commit()
        self.up.commit()
        if self.mirror is not None and self.moved is not None:
            self.mirror[self.ids.to(self.device)] = self.moved

    def rollback(self) -> None:
        """The step does not count. With a codec the ends compare what they remember, in one small message."""
        self._end_step()
        self.down.rollback()
        self.up.rollback()
        if self.mirror is not None:
            self._align()

    # --- evaluation

    @contextmanager
    def lend(self, ids: Tensor | None = None) -> Iterator[None]:
        """Inside, the first stage holds the rows of these tokens, exact; nothing is remembered, the rows of an open
        step come back. ids: as in `announce`."""
        told = self._told(self._tell(ids))
        rows = self._exact_rows(told)
        if self.first is not None:
            before = self.first.ids, self.first.weight
            self.first.put(told, rows)
        yield
        if self.first is not None:
            self.first.put(*before)

    # --- checkpoints: the same at both ends

    def state_dict(self) -> dict[str, Tensor]:
        """Of the last step that has ended; the rows of an open one are sent again. Equal at both ends."""
        mirror = {} if self.mirror is None else {"mirror": self.mirror.clone()}
        return {"step": torch.tensor(self.step - self.is_open), **mirror}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What `state_dict` gave at either end; without a mirror ({}) the owner's weight is remembered, and sent whole
        where the first stage has another. Both ends call it together, between steps."""
        self.step = int(state.get("step", 0))
        if self.mirror is not None:
            if "mirror" in state:
                self.mirror.copy_(state["mirror"])
            elif self.weight is not None:
                self.mirror.copy_(self.weight.detach())
            self._align()

    def close(self) -> None:
        """Wait for what is under way, and destroy the group that was made here."""
        if self.first is not None and self.arriving is not None:
            self.arriving.wait()
        self._finish_sending()
        self.pair.close()

    # --- inside

    @property
    def _rows(self) -> tuple[int, int]:
        return len(self.ids), self.width

    def _remember(self) -> None:
        """The mirrors of this message's rows leave the channel, whose state is by message, for the table by row."""
        if self.mirror is not None:
            self.moved = self.down.state.read("h", self.key)
            self.down.state.forget(self.key)

    def _read(self, channel: Channel) -> Tensor:
        """[k, d] of the message that is arriving; NaN where it is not the expected one."""
        assert self.arriving is not None, "nothing is under way: begin() a step first"
        frame = self.arriving.wait().to(self.device)
        self.arriving = None
        try:
            return channel.recv(self.key, frame, self._rows, self.dtype)
        except ValueError as error:
            logger.warning("a step is dropped: %s", error)
            return torch.full(self._rows, torch.nan, dtype=self.dtype, device=self.device)

    def _end_step(self) -> None:
        if not self.is_open:
            raise RuntimeError("no step is open: begin() one first")
        self._finish_sending()
        self.is_open = False

    def _exact_rows(self, ids: Tensor) -> Tensor:
        """[k, d] as the owner has them now, at both ends."""
        if self.weight is not None:
            rows = self.weight.detach()[ids.to(self.device)]
        else:
            rows = torch.empty(len(ids), self.width, dtype=self.dtype, device=self.device)
        self.sent += self.pair.copy(rows, OWNER, LENT)
        return rows

    def _align(self) -> None:
        """Where the mirrors differ, both become the owner's weight, sent whole."""
        assert self.mirror is not None
        if not self.pair.agree(_digest(self.mirror)):
            logger.warning("the ends of a tied embedding remember different rows: the owner sends all of them")
            self.mirror.copy_(self._exact_rows(torch.arange(self.vocabulary)))

    def _tell(self, ids: Tensor | None) -> Tensor | Message:
        """The ids themselves, sorted, or at an owner that is told them the message that brings them."""
        if self.tell and self.first is None:
            return self.pair.receive_set(self.vocabulary, IDS)
        if ids is None:
            raise UsageError(f"{WHAT}: announce(ids) wants the tokens of the step")
        mine = torch.unique(ids.cpu())
        if len(mine) and not 0 <= int(mine[0]) <= int(mine[-1]) < self.vocabulary:
            raise UsageError(f"{WHAT}: tokens {int(mine[0])} to {int(mine[-1])}, but {self.vocabulary} rows")
        if self.tell:
            self._post(self.pair.send_set(mine, self.vocabulary, IDS))
        return mine

    def _told(self, ids: Tensor | Message) -> Tensor:
        return ids if isinstance(ids, Tensor) else self.pair.read_set(ids, self.vocabulary)

    def _post(self, message: Message) -> None:
        self.sending.append(message)
        self.posted += message.frame.numel()

    def _count_sent(self) -> None:
        self.sent += self.posted
        self.posted = 0

    def _finish_sending(self) -> None:
        for message in self.sending:
            message.wait()
        self.sending = []


def _digest(x: Tensor) -> int:
    return int(checksum(raw_bytes(x)))
