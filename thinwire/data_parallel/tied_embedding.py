"""A tied embedding lives on the first and the last stage: both copies get one gradient, and must stay equal.

Fused (Optimus-CC): one reduction over {first, last} × replicas, 2D ranks; the mean times two is the sum of the two
stages' gradients, averaged over replicas. It sends V(2D−1)/D values per rank; one reduction on each stage and one
between them ("separate") send V(3D−2)/D. It is exact if its collective is. All ranks get the same bits either way.
By rows there is one copy per replica, the owner's: one reduction over replicas, after tied_rows.py has added to it; the
first stage has a `RowEmbedding`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.codecs.base import raw_bytes
from thinwire.collectives import Dense
from thinwire.collectives.groups import Group, Metered, unmetered
from thinwire.collectives.messages import all_reduce, gather
from thinwire.config.wire import Reduction, Wire, WireLike
from thinwire.data_parallel.reducer import Reducer
from thinwire.distributed.summary import Summary
from thinwire.distributed.thread import CommunicationThread
from thinwire.errors import UsageError
from thinwire.kernels.checksum import checksum

NAME = "tied embedding"
logger = logging.getLogger("thinwire.tied")


class TiedEmbedding:
    """This rank's copy of an embedding that the first and the last stage share.

        tied = tw.parallel.TiedEmbedding(embedding.weight, wire, ends)
        schedule.step(…); tied.finish()               # .grad is the sum over both stages

    parameter: the copy. wire: its embedding section is used, or exact averaging where it has none.
    ends: the process group of both stages over all replicas; by rows, of the owners. replicas: of this stage over all
    replicas. pair: of both stages in this replica. The last two are needed for sync = "separate" only.
    seed: of stochastic rounding and of random choices, equal on all ranks. agrees, thread: as of `Reducer`.

    UsageError where a group is missing, or ranks differ in configuration.
    """

    def __init__(
        self, parameter: nn.Parameter, wire: WireLike, ends: Group, replicas: Group = None, pair: Group = None, *,
        seed: int = 0, agrees: bool = True, thread: CommunicationThread | None = None,
    ) -> None:  # fmt: skip
        wire = Wire.of(wire)
        reduction = wire.embedding or Reduction(Dense())
        self.parameter = parameter
        self.ends = unmetered(ends)
        self.sync = reduction.sync
        if self.sync == "separate" and (replicas is None or pair is None):
            raise UsageError("sync = 'separate' needs the groups of this stage's replicas and of the two copies")
        self.pair = Metered(unmetered(pair))
        exact = Wire(gradient=replace(reduction, exact_dims=0, exclude=()), streams=wire.streams)
        group = replicas if self.sync == "separate" else ends
        self.reducer = Reducer([(NAME, parameter)], exact, group, seed=seed, agrees=agrees, thread=thread)
        self.healed = 0
        self.finished = 0  # passes of this object; those of a loaded state are not among them

    def finish(self) -> bool:
        """.grad ← the sum over both stages of the mean over replicas. False: rolled back, on all ranks."""
        good = self.reducer.finish()
        self._add_copies()
        return good

    def exchanged(self) -> bool:
        """`finish` for agrees = False: as of `Reducer`."""
        good = self.reducer.exchanged()
        self._add_copies()
        return good

    def _add_copies(self) -> None:
        gradient = self.parameter.grad
        if gradient is None:
            raise RuntimeError("the tied embedding has no gradient on any rank")
        self.finished += 1
        if self.sync == "fused":
            gradient.mul_(2)
        elif self.sync == "separate":
            gradient.copy_(all_reduce(gradient, self.pair))

    @property
    def sent(self) -> int:
        """Payload bytes that this rank has sent."""
        return self.reducer.exchange.sent + self.pair.sent

    @property
    def raw_sent(self) -> int:
        """What one exact fp32 reduction on each stage and one between them would have sent so far: V(3D−2)/D values."""
        return self._raw_per_step() * self.finished

    def _raw_per_step(self) -> int:
        replicas = self.reducer.size // 2 if self.sync == "fused" else self.reducer.size
        one = 4 * (self.parameter.numel() * (3 * replicas - 2) // replicas)
        return 2 * one if self.sync == "rows" else one  # the first stage, which has no copy, would send as much

    def summary(self) -> Summary:
        """What the fused or compressed exchange has saved on this rank so far, beside `raw_sent`'s way."""
        steps = self.reducer.summary().steps
        return Summary(steps, self.sent, self._raw_per_step() * steps, self.reducer.skips)

    def check(self, moments: Iterable[Tensor] = ()) -> bool:
        """Are all copies equal to the bit? If not, the first stage's is taken, it is counted, and said.

        moments: the optimiser's for this copy, in the same order on all ranks; they are taken from there too.
        """
        everyone = torch.cat(gather(torch.tensor([self.checksum()]).to(self._device), self.ends))
        if bool((everyone == everyone[0]).all()):
            return True
        self.heal(moments)
        return False

    def checksum(self) -> int:
        """Of this copy."""
        return int(checksum(raw_bytes(self.parameter.detach())))

    def heal(self, moments: Iterable[Tensor] = ()) -> None:
        """Take the first stage's copy, and its `moments`; all ranks of `ends` together."""
        with torch.no_grad():
            for tensor in (self.parameter, *moments):
                value = tensor.detach().to(self._device).contiguous()
                dist.broadcast(value, group=self.ends, group_src=0)
                tensor.copy_(value)
        self.healed += 1
        logger.warning("the copies of a tied embedding differed, and were healed from the first stage's")

    @property
    def _device(self) -> torch.device:
        """Where messages of `ends` have to be."""
        return self.parameter.device if dist.get_backend(self.ends) == "nccl" else torch.device("cpu")


class RowEmbedding(nn.Module):
    """Stands in the first stage for its copy of a tied embedding, and holds some of its rows, at first all.

    like: the embedding that it replaces. A token whose row is not there is an IndexError, on a card NaN; zeros
    without gradients, by which torch asks for shapes, always have an answer.
    """

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        if like.max_norm is not None or like.scale_grad_by_freq or like.sparse:
            raise UsageError("a tied embedding by rows: max_norm, scale_grad_by_freq and sparse are not supported")
        self.vocabulary, self.width = like.weight.shape
        self.padding = like.padding_idx
        self.padding_row = like.padding_idx  # the row here that gets no gradient, if any
        self.ids = torch.arange(self.vocabulary)
        self.weight = nn.Parameter(like.weight.detach())
        self.register_buffer("places", self.ids.to(self.weight.device, copy=True), persistent=False)

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """From now on hold the rows [k, d] of these tokens, sorted, and no others; `weight` is another parameter."""
        places = self.get_buffer("places").fill_(-1)
        places[ids.to(places.device)] = torch.arange(len(ids), device=places.device)
        self.ids = ids
        found = [] if self.padding is None else torch.nonzero(ids == self.padding).flatten().tolist()
        self.padding_row = found[0] if found else None
        self.weight = rows if isinstance(rows, nn.Parameter) else nn.Parameter(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.get_buffer("places")[tokens]
        if places.device.type == "cpu" and (torch.is_grad_enabled() or tokens.any()):
            return nn.functional.embedding(places, self.weight, self.padding_row)
        # a card would end the process for a row that is not there; NaN drops the step
        found = nn.functional.embedding(places.clamp(min=0), self.weight, self.padding_row)
        return found.masked_fill((places < 0)[..., None], torch.nan)
