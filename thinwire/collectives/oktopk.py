"""Ok-Topk: a sparse all-reduce whose volume does not grow with the number of workers (PPoPP 2022).

Thresholds are reused for τ′ steps and steered in between, regions of equal load are re-cut every τ steps, and every
region has one owner who adds it up; ≤ 6k(P−1)/P words for similar workers. Better than the paper: thresholds from
O(n) histograms, the global one by all-reducing the owners' histograms instead of gathering all non-zeros; regions from
a *pooled* index histogram, which balances unlike workers too; the cyclic region → owner shift that keeps most entries
home; coded indices and values, with what coding changed charged to whoever coded it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import TopK
from thinwire.codecs.entries import Entries
from thinwire.collectives.base import Collective, State, all_reduce, gather, world
from thinwire.collectives.regions import balanced_gather, join, put, split_and_reduce
from thinwire.errors import UsageError
from thinwire.kernels import select

INDEX_BINS = 4096  # of the pooled histogram that regions are cut from
DRIFT = 1.25  # counts within a factor of this of k are steered; beyond it the threshold is taken afresh
FINE_BINS = 1024  # of the histogram that refines one bin of the first
FINE_SHIFT = select.HISTOGRAM_SHIFT - 10
STEER = 0.05  # threshold ← threshold · (count/k)^STEER · pace; counts fall with the 7th to 15th power at 1 %
PACE = 0.75  # how much of a threshold's last movement is expected again: residuals grow for a hundred steps and more


@dataclass(frozen=True)
class OkTopk(Collective):
    """Wire steps of one exchange:

    1. local: entries with |u| ≥ th_l, at most DRIFT·k of them (th_l exact every τ′ steps, steered in between)
    2. every τ steps: all-reduce the index histogram, cut P regions of equal load; choose the owner shift
    3. all-gather the P×P counts; 4. swap: each region's entries to its owner, in rotation; the owner adds in rank order
    5. every τ′ steps: all-reduce the owners' magnitude histograms → th_g, so that k entries pass (steered in between)
    6. all-gather the owners' counts; where one is crowded, hand over contiguous shares (balance)
    7. swap: everybody's share to everybody; mean = sum/P
    own = this member's entries that passed globally, as they were sent, plus what coding did to the sums it owns.
    """

    density: float
    tau: int = 64
    tau_prime: int = 32
    values: str = "fp32"
    indices: str = "int32"

    def __post_init__(self) -> None:
        TopK(self.density), Entries(self.values, self.indices)  # they refuse bad settings
        for name in ("tau", "tau_prime"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UsageError(f"{name} must be a positive integer, not {getattr(self, name)!r}")

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, _ = world(group)
        flat = u.reshape(-1)
        n = flat.numel()
        if n == 0:
            return u.clone(), u.clone()
        k, age = TopK(self.density).count(n), int(state.get("age", torch.tensor(0)))
        index, values = self._local(flat, k, state, fresh=age % self.tau_prime == 0)
        if "bounds" not in state or age % self.tau == 0 or state["bounds"].numel() != size + 1:
            self._cut_regions(index, n, state, group)
        bounds, shift = state["bounds"].tolist(), int(state["shift"])
        code = Entries(self.values, self.indices)
        region, mine, sent = split_and_reduce((index, values), bounds, shift, code, group)
        (index, sums), held = _pick(region, k, state, group, fresh=age % self.tau_prime == 0)
        index += bounds[mine]
        everything = join(balanced_gather((index, sums), held, n, code, group))
        mean, passed = put(n, *everything), torch.zeros(n, dtype=torch.bool, device=flat.device)
        passed[everything[0]] = True
        kept = passed[sent[0]]
        own = put(n, sent[0][kept], sent[1][kept])
        select.scatter_add(own, index, mean[index] - sums)  # what coding did to the sums it owns
        state["age"] = torch.tensor(age + 1)
        return mean.div_(size).view(u.shape), own.view(u.shape)

    def _local(self, flat: Tensor, k: int, state: State, fresh: bool) -> tuple[Tensor, Tensor]:
        """Step 1. A threshold that has drifted too far is taken afresh: that is a local matter."""
        cap = min(flat.numel(), max(k, int(DRIFT * k)))
        if not fresh and "th_l" in state:
            index, values = select.select(flat, state["th_l"], flat.numel())
            if k / DRIFT <= index.numel() <= cap:
                _steer(state, "l", index.numel() / k)
                return index, values
        index, values = select.top(flat, k)
        _renew(state, "l", values.abs().min())
        return index, values

    def _cut_regions(self, index: Tensor, n: int, state: State, group: Any) -> None:
        """Step 2: boundaries of equal pooled load, and the shift that keeps most entries at home."""
        size, _ = world(group)
        bins = min(INDEX_BINS, n)
        counts = all_reduce(torch.bincount(index * bins // n, minlength=bins).int(), group).double()
        load = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        wanted = load[-1] * torch.arange(1, size, device=load.device) / size
        place = torch.searchsorted(load, wanted).clamp(1, bins)
        share = (wanted - load[place - 1]) / (load[place] - load[place - 1]).clamp(min=1e-30)
        inner = (((place - 1) + share.clamp(0, 1)) * n / bins).long()
        ends = torch.tensor([0, n], device=inner.device)
        bounds = torch.cat((ends[:1], inner, ends[1:])).cummax(0).values
        state["bounds"] = bounds
        held = torch.searchsorted(index, bounds).diff()
        matrix = torch.stack(gather(held, group))  # [member, region]
        home = [sum(int(matrix[(j + s) % size, j]) for j in range(size)) for s in range(size)]
        state["shift"] = torch.tensor(max(range(size), key=home.__getitem__))


def _pick(region: Tensor, k: int, state: State, group: Any, fresh: bool) -> tuple[tuple[Tensor, Tensor], list[int]]:
    """Steps 5 and 6: this member's sums that pass globally, and how many every member has.

    A threshold under which too many or too few passed is taken afresh before anything is sent; everybody sees the same
    counts, so everybody does.
    """
    if not fresh and "th_g" in state:
        picked, counts = _above(region, state["th_g"], group)
        if k / DRIFT <= sum(counts) <= DRIFT * k:
            _steer(state, "g", sum(counts) / k)
            return picked, counts
    threshold = _pooled_threshold(region, k, group)
    _renew(state, "g", threshold)
    return _above(region, threshold, group)


def _above(region: Tensor, threshold: Tensor, group: Any) -> tuple[tuple[Tensor, Tensor], list[int]]:
    picked = select.select(region, threshold, region.numel())
    return picked, [int(c) for c in gather(torch.tensor([picked[0].numel()]), group)]


def _pooled_threshold(region: Tensor, k: int, group: Any) -> Tensor:
    """The k-th magnitude of the whole sum from all-reduced histograms: first its eighth of an octave, then 1/1024 of
    that (an eighth alone lets up to twice too many pass)."""
    counts = all_reduce(select.histogram(region.float()), group)
    counts[0] = 0  # zeros are nobody's entries
    edge = select.threshold_from(counts, k).clamp(min=torch.finfo(torch.float32).tiny)
    low = edge.view(torch.int32).long()
    bits = select.magnitude_bits(select.select(region, edge, region.numel())[1])
    place = ((bits - low) >> FINE_SHIFT).clamp(max=FINE_BINS)  # the last: all above this eighth of an octave
    fine = all_reduce(torch.bincount(place, minlength=FINE_BINS + 1), group)
    above = fine.flip(0).cumsum(0).flip(0)
    step = (above >= k).sum().clamp(1, FINE_BINS) - 1
    return (low + (step << FINE_SHIFT)).to(torch.int32).view(torch.float32)


def _steer(state: State, which: str, excess: float) -> None:
    """The next step's threshold after `excess` times as many entries as wanted passed."""
    moved = excess**STEER
    _move(state, which, state[f"th_{which}"] * moved, moved)


def _renew(state: State, which: str, exact: Tensor) -> None:
    """The next step's threshold after this step's was found exactly."""
    used = float(state.get(f"th_{which}", exact))
    _move(state, which, exact, float(exact) / used if used > 0 and float(exact) > 0 else 1.0)


def _move(state: State, which: str, threshold: Tensor, moved: float) -> None:
    pace = (state.get(f"pace_{which}", torch.ones(())) * moved).clamp(0.5, 2.0) ** PACE
    state[f"pace_{which}"] = pace
    state[f"th_{which}"] = threshold * pace.to(threshold.device)
