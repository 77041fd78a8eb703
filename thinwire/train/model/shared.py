"""Weights that every stage has a copy of, as DeBERTa's table of relative positions: all copies get one gradient.

One exact reduction over all stages of all replicas of a site; the mean times the number of pipeline ranks is the sum
of the stages' gradients, averaged over replicas. All ranks get the same bits, so that the copies stay equal to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.codecs.base import raw_bytes
from thinwire.config.wire import Wire
from thinwire.data_parallel.reducer import Reducer
from thinwire.distributed.thread import CommunicationThread
from thinwire.kernels.checksum import checksum

logger = logging.getLogger("thinwire.tied")


class SharedWeights:
    """This rank's copies.

    named: them, by name. stages: how many pipeline ranks a replica has. seed: the run's. site: the ranks of this site;
    None: all ranks. thread: as of `Reducer`.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], stages: int, seed: int, site: dist.ProcessGroup | None = None,
        thread: CommunicationThread | None = None,
    ) -> None:  # fmt: skip
        self.named = dict(named)
        self.stages = stages
        self.site = site
        self.reducer = Reducer(self.named.items(), Wire(), site, seed=seed, agrees=False, thread=thread)

    def exchanged(self) -> bool:
        """.grad ← the sum over stages of the mean over replicas; False where this rank saw a fault (`Reducer`)."""
        good = self.reducer.exchanged()
        for weight in self.named.values():
            assert weight.grad is not None
            weight.grad.mul_(self.stages)
        return good

    def checksum(self) -> int:
        """Of all copies of this rank together."""
        values = [raw_bytes(weight.detach()) for weight in self.named.values()]
        return int(checksum(torch.cat(values)))

    def heal(self, moments: Iterable[Tensor]) -> None:
        """Take the first rank's copies, and its `moments`; all ranks of the site together."""
        with torch.no_grad():
            for tensor in (*self.named.values(), *moments):
                dist.broadcast(tensor.detach(), group=self.site, group_src=0)
        logger.warning("the copies of a weight that all stages share differed, and were healed from the first rank's")
