"""Ok-Topk of all workers at once: what the collective does between members of a group, as a few passes over the rows.

On a card a collective asks for sizes some thirty times per member and step, and a card that several runs share answers
late. Here nothing is asked between two re-estimations, and one kernel does the exchange (oktopk_kernel.py), in a CUDA
graph. Means and residuals have the collective's bits, and entries are counted as it sends them
(tests/test_benchmarks_oktopk.py compares all three over many steps).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from thinwire.codecs import TopK
from thinwire.collectives import OkTopk
from thinwire.collectives.oktopk import equal_load, home_shift, index_histogram
from thinwire.collectives.regions import CROWDED
from thinwire.collectives.reused import FEWEST, MOST, NUDGE
from thinwire.collectives.thresholds import SMALLEST, pooled_threshold
from thinwire.config.wire import Reduction, warmup_steps
from thinwire.kernels import select

ENTRY = 8  # bytes: index and value


def is_published(reduction: Reduction) -> bool:
    """Can this be computed here? Ok-Topk of the whole gradient that reuses its thresholds and sends plain entries."""
    rule = reduction.collective
    return (
        isinstance(rule, OkTopk) and rule.thresholds != "predicted" and (rule.values, rule.indices) == ("fp32", "int32")
        and rule.repartition and rule.rotation and not reduction.exact_dims and not reduction.exclude
    )  # fmt: skip


class AllAtOnce:
    """Residuals and thresholds of all workers.

    size: workers. n: values of a gradient. reduction: with the collective. device: of the gradients.
    """

    def __init__(self, size: int, n: int, reduction: Reduction, device: torch.device) -> None:
        assert isinstance(reduction.collective, OkTopk)
        self.size, self.n, self.rule, self.age = size, n, reduction.collective, 0
        self.warmup, self.steps, self.exact_bytes = warmup_steps("gradient", reduction), 0, 0.0
        rule = self.rule
        self.k = TopK(rule.density).count(n)
        self.residuals = torch.zeros(size, n, device=device)
        self.local = torch.zeros(size, device=device)  # thresholds
        self.overall = torch.zeros(1, device=device)
        self.bounds: list[int] = []
        self.shift = 0
        self.by_kernel = device.type == "cuda"
        self.found = torch.zeros(size * size + size, dtype=torch.int32, device=device)  # counts of one exchange
        self.cut_at = torch.zeros(size + 1, dtype=torch.int64, device=device)  # bounds,
        self.shifted = torch.zeros(1, dtype=torch.int64, device=device)  # and shift, for the kernel
        self.graph: torch.cuda.CUDAGraph | None = None  # of an exchange between two re-estimations
        self.seen: tuple[Tensor, Tensor] | None = None  # its gradients and its mean
        self.counts: list[tuple[Tensor, Tensor, int]] = []  # per exchange: [worker, region], [region], shift

    def average(self, gradients: Tensor) -> list[Tensor]:
        """The mean that every worker gets."""
        self.steps += 1
        if self.steps <= self.warmup:
            self.exact_bytes += 2 * 4 * self.n * (self.size - 1) / self.size  # as a ring
            mean = gradients[0].clone()
            for row in gradients[1:]:
                mean += row
            return [mean / self.size]
        return [self._exchanged(gradients)]

    def residual(self, rank: int) -> Tensor:
        """Before the next step."""
        return self.residuals[rank]

    def _steady(self, gradients: Tensor) -> Tensor:
        """An exchange with known thresholds and regions; nothing is asked of the card."""
        from oktopk_kernel import exchange

        given = self.local, self.overall, self.cut_at, self.shifted
        mean = exchange(gradients, self.residuals, *given, self.found.zero_())
        selected, held = self._split(self.found)
        self.local.copy_(self._nudged(self.local, selected.sum(1)))
        self.overall.copy_(self._nudged(self.overall, held.sum()))
        return mean

    def _replayed(self, gradients: Tensor) -> Tensor:
        """`_steady`, as a CUDA graph from the second time on that the same memory holds the gradients."""
        if self.graph is not None and self.seen is not None and self.seen[0].data_ptr() == gradients.data_ptr():
            self.graph.replay()
            return self.seen[1]
        mean = self._steady(gradients)
        if gradients.is_cuda and self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # recorded, not run
                self.seen = gradients, self._steady(gradients)
        return mean

    def _split(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """(selected by worker and region, passed by region)."""
        square = self.size * self.size
        return found[:square].view(self.size, self.size), found[square:]

    def _exchanged(self, gradients: Tensor) -> Tensor:
        again = self.age % self.rule.tau_prime == 0
        if self.by_kernel and not again and self.age % self.rule.tau:
            mean = self._replayed(gradients)
            self.counts.append((*self._split(self.found.clone()), self.shift))
            self.age += 1
            return mean
        u = self.residuals + gradients
        chosen = self._chosen(u, again)
        if self.age % self.rule.tau == 0:
            self._cut(chosen)
        sums = self._sums(torch.where(chosen, u, 0))
        if again:
            self.overall.copy_(pooled_threshold(sums, self.k, None).view(1))
        passed = sums.abs() >= self.overall
        regions = list(pairwise(self.bounds))
        held = torch.stack([passed[a:b].sum() for a, b in regions])
        selected = torch.stack([chosen[:, a:b].sum(1) for a, b in regions], 1)
        self.local.copy_(self._nudged(self.local, selected.sum(1)))  # in place: the graph reads them there
        self.overall.copy_(self._nudged(self.overall, held.sum()))
        self.counts.append((selected, held, self.shift))
        self.age += 1
        self.residuals += gradients - torch.where(chosen & passed, u, 0)  # in the order of the memory's rule
        return torch.where(passed, sums / self.size, 0)

    def sent(self) -> list[float]:
        """Bytes of entries per worker so far; counts and histograms, some 1.7 kB per step, are left out."""
        total = [self.exact_bytes] * self.size
        if not self.counts:
            return total
        selected, held = (torch.stack(found).tolist() for found in list(zip(*self.counts))[:2])  # one wait each
        for chosen, passed, (_, _, shift) in zip(selected, held, self.counts):
            for worker, nbytes in enumerate(sent_of(chosen, passed, shift)):
                total[worker] += nbytes
        return total

    def selected(self) -> list[list[int]]:
        """Per worker: entries it selected, entries that passed; of the last exchange."""
        chosen, held, _ = self.counts[-1]
        return [[count, int(held.sum())] for count in chosen.sum(1).tolist()]

    def _chosen(self, u: Tensor, again: bool) -> Tensor:
        """bool[workers, n]: what each selects; `again`: exactly k, whose least magnitude is the next threshold."""
        if not again:
            return u.abs() >= self.local[:, None]
        chosen = torch.zeros_like(u, dtype=torch.bool)
        for worker, row in enumerate(u):
            index, values = select.top(row, self.k)
            chosen[worker, index] = True
            self.local[worker] = values.abs().min()
        if float(self.local.min()) <= SMALLEST:
            raise RuntimeError("fewer than k values are not zero: take the collective itself")
        return chosen

    def _cut(self, chosen: Tensor) -> None:
        index = [torch.nonzero(row).reshape(-1) for row in chosen]
        counts = torch.stack([index_histogram(one, self.n) for one in index]).sum(0)
        bounds = equal_load(counts, self.n, self.size)
        self.shift = home_shift([torch.searchsorted(one, bounds).diff().tolist() for one in index])
        self.bounds = bounds.tolist()
        self.cut_at.copy_(bounds)
        self.shifted.fill_(self.shift)

    def _sums(self, sparse: Tensor) -> Tensor:
        """Every region's owner adds its own entries, then those of the members before it in rotation."""
        sums = torch.empty(self.n, device=sparse.device)
        for region, (a, b) in enumerate(pairwise(self.bounds)):
            owner = (region + self.shift) % self.size
            sums[a:b] = sparse[owner, a:b]
            for step in range(1, self.size):
                sums[a:b] += sparse[(owner - step) % self.size, a:b]
        return sums

    def _nudged(self, threshold: Tensor, count: Tensor) -> Tensor:
        """For the next exchange, after so many have passed this one."""
        if self.rule.thresholds != "nudged":
            return threshold
        moved = torch.where(count > MOST * self.k, NUDGE, torch.where(count < FEWEST * self.k, 1 / NUDGE, 1.0).double())
        exact = threshold.double()
        return torch.where(moved < 1, exact / NUDGE, exact * moved).float()


def sent_of(selected: list[list[int]], held: list[int], shift: int) -> list[int]:
    """Bytes of entries that each worker sends in an exchange: to the regions' owners, for balance, and to everybody.

    selected: [worker][region]. held: entries that passed, by region. shift: region j is owned by (j + shift) mod P.
    """
    size = len(held)
    owner = [(region + shift) % size for region in range(size)]
    sent = [sum(count for j, count in enumerate(row) if owner[j] != worker) for worker, row in enumerate(selected)]
    shares = list(held)
    if max(held) * size > CROWDED * sum(held):
        total = sum(held)
        cuts = [total * j // size for j in range(size + 1)]
        start = 0
        for region, count in enumerate(held):
            kept = max(0, min(start + count, cuts[region + 1]) - max(start, cuts[region]))
            sent[owner[region]] += count - kept
            start += count
        shares = [b - a for a, b in pairwise(cuts)]
    for region, count in enumerate(shares):
        sent[owner[region]] += (size - 1) * count
    return [ENTRY * count for count in sent]
