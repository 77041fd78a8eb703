"""Ok-Topk: a sparse all-reduce whose volume does not grow with the number of workers (PPoPP 2022).

Thresholds are predicted from the last steps and corrected on the spot, regions of equal load are re-cut every τ steps,
and every region has one owner who adds it up; ≤ 6k(P−1)/P words for similar workers. Better than the paper: an exact
local selection in one pass over n; the global threshold from the owners' counts and histograms instead of all
non-zeros; regions from a *pooled* index histogram, which balances unlike workers too; the cyclic region → owner shift
that keeps most entries home; coded indices and values, with what coding changed charged to whoever coded it.
The paper's own rule for thresholds, and its parts one by one, can be chosen: `thresholds`, `rotation`, ….
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import thinwire.collectives.thresholds as thresholds
from thinwire.codecs import TopK
from thinwire.codecs.entries import Entries
from thinwire.collectives.base import Collective, State
from thinwire.collectives.groups import Group, world
from thinwire.collectives.messages import all_reduce, gather
from thinwire.collectives.regions import Picked, balanced_gather, put, region_bounds, split_and_reduce
from thinwire.collectives.reused import Reused
from thinwire.collectives.sums import exact_mean
from thinwire.errors import UsageError
from thinwire.kernels import select

INDEX_BINS = 4096  # of the pooled histogram that regions are cut from
SCOPES = ("unit", "model")
THRESHOLDS = ("predicted", "reused", "nudged")


@dataclass(frozen=True)
class OkTopk(Collective):
    """Wire steps of one exchange:

    1. local: the k entries of largest |u|, found among the candidates that pass a predicted threshold; of fewer
       non-zeros all
    2. every τ steps: all-reduce the index histogram, cut P regions of equal load; choose the owner shift
    3. all-gather the P×P counts
    4. swap: each region's entries to its owner, in rotation; the owner adds what arrived
    5. all-gather the owners' counts at a few thresholds around the predicted th_g; the one that about k pass is taken.
       Every τ′ steps, and where the prediction missed: all-reduce the owners' magnitude histograms instead
    6. where an owner is crowded, hand over contiguous shares (balance)
    7. swap: everybody's share to everybody; mean = sum/P
    own = this member's entries that passed globally, as they were sent, plus what coding did to the sums it owns.

    On a card the host waits twice: for the counts of step 3 and of step 5 (more often where regions are cut or the
    prediction missed). Where a message was damaged the mean is NaN there.

    `scope="model"`: k is the whole model's. Every unit is exchanged on its own, as early as it is there;
    `finish_step`, once per step, shares k out anew so that all units come to the same threshold. Without `finish_step`
    every unit keeps its own k.

    density: k/n, the share of values selected, in (0, 1]. tau: τ, exchanges between two cuts of regions. tau_prime: τ′,
    exchanges between two thresholds from histograms. values: how values travel, "fp32", "bf16" or "int8". indices: how
    indices travel, "int32" or "coded" (Elias–Fano or a bitmap). scope: whose k, "unit" or "model". xi_every: exchanges
    between two measurements of ξ (see `xi`), kept in the state; 0: none. thresholds: "predicted" (k are selected in
    every exchange); "reused", the paper's rule: found every τ′ exchanges, and all that passes them selected in between;
    or "nudged", as in its code: reused, but moved a little where far more or fewer than k pass. rotation, bucketing,
    repartition, balancing: False: without that part of the paper, for an ablation: step 4's order and its overlap with
    adding, regions of equal load (else equal lengths), and step 6.
    """

    density: float
    tau: int = 64
    tau_prime: int = 32
    values: str = "fp32"
    indices: str = "int32"
    scope: str = "unit"
    xi_every: int = 0
    thresholds: str = "predicted"
    rotation: bool = True
    bucketing: bool = True
    repartition: bool = True
    balancing: bool = True

    def __post_init__(self) -> None:
        TopK(self.density), Entries(self.values, self.indices)  # they refuse bad settings
        for name, least in (("tau", 1), ("tau_prime", 1), ("xi_every", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise UsageError(f"{name} must be an integer from {least}, not {getattr(self, name)!r}")
        if self.scope not in SCOPES:
            raise UsageError(f"scope must be one of {', '.join(SCOPES)}, not {self.scope!r}")
        if self.thresholds not in THRESHOLDS:
            raise UsageError(f"thresholds must be one of {', '.join(THRESHOLDS)}, not {self.thresholds!r}")
        if self.thresholds != "predicted" and self.scope == "model":
            raise UsageError(f"thresholds {self.thresholds}: are of one unit; scope = 'model' takes predicted ones")
        for name in ("rotation", "bucketing", "repartition", "balancing"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}")

    def exchange(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, _ = world(group)
        flat = u.reshape(-1)
        n, age = flat.numel(), int(state.get("age", 0))
        if n == 0:
            return u.clone(), u.clone()
        k = TopK(self.density).count(n)
        if self.scope == "model":
            k = int(state.get("share", k))
        # 1. this member's k largest, or what passes a reused threshold
        reused = None if self.thresholds == "predicted" else Reused(self.thresholds == "nudged")
        again = age % self.tau_prime == 0
        picked = thresholds.pick(flat, k, state) if reused is None else reused.pick(flat, k, state, again)
        if "seen_l" in state and float(state["seen_l"][0]) <= thresholds.SMALLEST:  # fewer than k may not be zero
            keep = torch.nonzero(picked[1]).reshape(-1)
            picked = picked[0][keep], picked[1][keep]
        # 2. regions and their owners
        if "bounds" not in state or age % self.tau == 0 or state["bounds"].numel() != size + 1:
            self._cut_regions(picked[0], n, state, group)
        bounds, shift = state["bounds"].tolist(), int(state["shift"])
        # 3. and 4. counts, then entries to their owners, who add them
        code = Entries(self.values, self.indices, later=True)
        region, mine, sent, unit = split_and_reduce(picked, bounds, shift, code, group, self.rotation, self.bucketing)
        # 5. the sums that pass globally; in another unit than usual no threshold is known
        pick_sums = thresholds.pick_sums if reused is None else reused.pick_sums
        (index, sums), held = pick_sums(region, k, state, group, again or unit != 1)
        owned = index + bounds[mine], sums
        # 6. and 7. balanced over the members, then to everybody
        passed, values = balanced_gather(owned, held, shift, n, code, group, self.balancing)
        mean, own = put(n, passed, values / (size / unit)), _passed(sent, passed, n)
        if not code.is_exact:  # what coding did to the sums it owns
            select.scatter_add(own, owned[0], mean[owned[0]] * (size / unit) - sums)
        own = own if unit == 1 else own * unit
        if thresholds.is_on_card(mean):  # the caller looks whether it is finite, and waits then
            mean.masked_fill_(~code.all_good(), float("nan"))
        code.raise_if_damaged()
        state["selected"] = torch.tensor([picked[0].numel(), passed.numel()])  # locally, globally
        state["age"] = torch.tensor(age + 1)
        if self.xi_every and age % self.xi_every == 0:
            state["xi"] = xi(flat, mean, passed.numel(), group)
        return mean.view(u.shape), own.view(u.shape)

    def finish_step(self, states: list[State], numels: list[int], group: Group = None) -> None:
        """Scope "model": every unit's share of k in the next step. Nothing is sent."""
        if self.scope == "model":
            thresholds.finish_step(states, numels, TopK(self.density).count(sum(numels)))

    def _cut_regions(self, index: Tensor, n: int, state: State, group: Group) -> None:
        """Step 2: boundaries of equal pooled load, and the shift that keeps most entries at home."""
        size, _ = world(group)
        if not self.repartition:
            state["bounds"] = torch.tensor(region_bounds(n, size))
            state["shift"] = torch.tensor(0)
            return
        counts = all_reduce(index_histogram(index, n), group)
        bounds = equal_load(counts, n, size)
        state["bounds"] = bounds.cpu()
        held = torch.searchsorted(index, bounds).diff()
        state["shift"] = torch.tensor(home_shift(torch.stack(gather(held, group)).tolist()))


def index_histogram(index: Tensor, n: int) -> Tensor:
    """int32[bins]: where in n values these entries lie."""
    bins = min(INDEX_BINS, n)
    return torch.bincount(index * bins // n, minlength=bins).int()


def equal_load(counts: Tensor, n: int, size: int) -> Tensor:
    """int64[size + 1]: boundaries of regions of n values with equally many entries. counts: their histogram."""
    bins, load = counts.numel(), torch.cat((counts.new_zeros(1).double(), counts.double().cumsum(0)))
    wanted = load[-1] * torch.arange(1, size, device=load.device) / size
    place = torch.searchsorted(load, wanted).clamp(1, bins)
    share = (wanted - load[place - 1]) / (load[place] - load[place - 1]).clamp(min=1e-30)
    inner = (((place - 1) + share.clamp(0, 1)) * n / bins).long()
    ends = torch.tensor([0, n], device=inner.device)
    return torch.cat((ends[:1], inner, ends[1:])).cummax(0).values


def home_shift(held: list[list[int]]) -> int:
    """The shift of regions to owners that keeps most entries where they are. held: [member][region], how many."""
    size = len(held)
    home = [sum(held[(j + s) % size][j] for j in range(size)) for s in range(size)]
    return max(range(size), key=home.__getitem__)


def _passed(sent: Picked, index: Tensor, n: int) -> Tensor:
    """float[n] of the entries sent, where their index is among those that passed."""
    passed = torch.zeros(n, dtype=torch.bool, device=index.device)
    passed[index] = True
    return put(n, sent[0], torch.where(passed[sent[0]], sent[1], 0))


def xi(acc: Tensor, mean: Tensor, k: int, group: Group = None, gradient: Tensor | None = None) -> Tensor:
    """0-d: ‖Topk(mean acc) − Topk(mean Topk(acc))‖ / ‖mean acc‖, by how much the method's mean misses the best k.

    acc: this member's accumulated gradient, what was exchanged. mean: what exchange gave back for it, with k entries.
    group: the process group. gradient: this member's; the mean gradient is then below the line, as in the proof of
    convergence, which asks for a bound. Expensive: one dense all-reduce, two with a gradient.
    """
    true = exact_mean(acc.reshape(-1), group)
    best = put(true.numel(), *select.top(true, k))
    below = true if gradient is None else exact_mean(gradient.reshape(-1), group)
    scale = torch.linalg.vector_norm(below)
    return torch.where(scale > 0, torch.linalg.vector_norm(best - mean.reshape(-1)) / scale, 0.0)
