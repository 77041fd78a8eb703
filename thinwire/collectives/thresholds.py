"""Ok-Topk's two thresholds: th_l for a member's own values, th_g for the sums; reused, and corrected on the spot.

Counts fall like count(|x| ≥ th) ~ th^−s near the right threshold, the one that k pass; it moves from step to step, with
the residuals, which grow for a hundred steps and more, and with the gradients, whose size jumps. So a threshold is
predicted from the last ones, and used a little low:

- locally it passes about AIM·k candidates, of which the k largest are taken: an exact selection for one pass over n;
- for the sums, owners count what passes GRID thresholds around the prediction, each passing RATIO times the next.
  Everybody learns everybody's counts and takes the threshold whose total is nearest to k.

Where a prediction misses by more, the threshold is found from histograms before anything is sent.

Scope "model": k is shared out over units so that all have the same threshold, which is the selection of the k largest
of the whole model. Shares are those of the last step, so units can be exchanged while others are not there yet; and
since they add up to k, so do the counts, however much gradients grow or shrink from one step to the next.

Everything is kept in `state`: "th_*" the prediction, "pace_*" the factor it is expected to move by in a step, "seen_*"
(the right threshold of the last step, the count, the slope s), where * is l or g; "share" a unit's share of k.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.collectives.base import State
from thinwire.collectives.groups import Group, world
from thinwire.collectives.messages import all_reduce, gather, upload
from thinwire.collectives.regions import Picked
from thinwire.kernels import select

AIM, MOST = 2.0, 5.0  # candidates, in k: what th_l is made for, and what is still worth sifting
ROOM = 3  # sums that one owner may hold above the lowest threshold, in k, where memory is padded
GRID, RATIO = 17, 1.08  # thresholds that sums are counted at; neighbours' counts differ by about this factor
MARGIN = 4  # thresholds above the chosen one that a slope is measured on, at least
STRETCH = 1.1  # a second threshold, that shows how counts fall
DRIFT = 1.1  # a count within this factor of k is good enough
LEVEL, TREND, PACE = 0.85, 0.3, 0.9  # how much of a surprise is believed; of a movement, goes into the pace; decay
STEEPEST, FLATTEST = 20.0, 1.0  # slopes that are believed
FASTEST = 2.0  # a threshold's pace at most, in either direction
SHIFT = 0.5  # how much of the way to equal thresholds shares go in a step,
LEAP = 2.0  # by at most this factor
FINE_BINS = 1024  # of the histogram that refines one bin of the first
FINE_SHIFT = select.HISTOGRAM_SHIFT - 10
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny  # sums below this are nobody's entries


def pick(flat: Tensor, k: int, state: State) -> Picked:
    """The k largest of this member's values, in index order: exactly select.top(flat, k), at a third of its cost.

    flat: float[n]. state: the unit's; the prediction is taken from it and corrected in it.
    """
    if is_on_card(flat):  # the exact selection takes one pass there too, and no prediction has to be judged
        return select.top(flat, k)
    if "seen_l" in state:
        low = float(state["th_l"]) * AIM ** (-1 / float(state["seen_l"][2]))
        index, values = select.select(flat, low, flat.numel())
        if k <= index.numel() <= MOST * k:
            place, values = select.top(values, k)
            _learn(state, "l", *_edge(values, k))
            return index[place], values
    picked = select.top(flat, k)
    _learn(state, "l", *_edge(picked[1], k))
    return picked


def is_on_card(x: Tensor) -> bool:
    """Does the host have to wait before it knows a value of x?"""
    return x.is_cuda


def _edge(values: Tensor, k: int) -> tuple[float, int, float]:
    """(the least of k magnitudes, k, how counts fall there), as `_learn` takes them."""
    sizes = values.abs().float()
    least = sizes.min()
    beyond = int((sizes >= least * STRETCH).sum())
    return float(least), k, math.log(k / max(beyond, 0.5)) / math.log(STRETCH)


def pick_sums(region: Tensor, k: int, state: State, group: Group, fresh: bool) -> tuple[Picked, list[int]]:
    """This member's sums that pass globally, and how many every member has.

    region: the sums that this member owns. k: how many should pass, over all members. state: the unit's; the prediction
    is taken from it and corrected in it. fresh: from histograms in any case.
    """
    if not fresh and "seen_g" in state:
        slope = float(state["seen_g"][2])
        step = math.log(RATIO) / slope
        grid = (float(state["th_g"]) * torch.exp(step * (torch.arange(GRID) - GRID // 2))).clamp(min=SMALLEST)
        above = _above_padded if is_on_card(region) else _above
        picked, place, counts = above(region, upload(grid, region.device), group, ROOM * k)
        table = counts.tolist()  # on a card the one wait
        total = [sum(column) for column in zip(*table)]
        best = min(range(GRID), key=lambda j: (abs(math.log(max(total[j], 0.5) / k)), -j))
        if min(map(min, table)) >= 0 and k <= DRIFT * total[best] and total[best] <= DRIFT * k:
            if best < GRID - MARGIN:
                slope = math.log(total[best] / max(total[-1], 0.5)) / (step * (GRID - 1 - best))
            _learn(state, "g", float(grid[best]) * (total[best] / k) ** (1 / max(slope, FLATTEST)), total[best], slope)
            held = [row[best] for row in table]
            return _first_passing(picked, place, best, held[world(group)[1]]), held
    exact_one = pooled_threshold(region, k, group)
    picked, _, counts = _above(region, torch.stack((exact_one, exact_one * STRETCH)), group, region.numel())
    count, beyond = counts.sum(0).tolist()
    _learn(state, "g", float(exact_one), count, math.log(max(count, 1) / max(beyond, 0.5)) / math.log(STRETCH))
    return picked, counts[:, 0].tolist()


def _above(region: Tensor, grid: Tensor, group: Group, room: int) -> tuple[Picked, Tensor, Tensor]:
    """This member's sums above the lowest of ascending thresholds; how many thresholds each of them passes; [members,
    grid]: how many sums pass each, everywhere."""
    picked = entries_above(region, grid[0])
    place = torch.bucketize(picked[1].abs().float(), grid, right=True).clamp(min=1)  # they all pass the lowest
    passing = torch.bincount(place, minlength=grid.numel() + 1)[1:].flip(0).cumsum(0).flip(0)
    return picked, place, torch.stack(gather(passing.int(), group))


def _above_padded(region: Tensor, grid: Tensor, group: Group, room: int) -> tuple[Picked, Tensor, Tensor]:
    """`_above` without waiting for the card: in memory for `room` sums at most, those left over pass no threshold. A
    member with more says −1 for all its counts."""
    wide = region.to(torch.promote_types(region.dtype, torch.float32))
    room = min(room, region.numel())
    index, values = torch.empty(room, dtype=torch.int64, device=region.device), wide.new_empty(room)
    found = select.select_into(wide, grid[0], index, values)
    place = torch.bucketize(values.abs().float(), grid, right=True)
    passing = (place > torch.arange(grid.numel(), device=region.device)[:, None]).sum(1)
    passing = torch.where(found <= room, passing, -1)
    return (index, values.to(region.dtype)), place, torch.stack(gather(passing.int(), group))


def _first_passing(picked: Picked, place: Tensor, best: int, count: int) -> Picked:
    """The `count` entries that pass more than `best` thresholds."""
    index, values = picked
    if not is_on_card(index):
        keep = torch.nonzero(place > best).reshape(-1)
    else:  # their number is known: nothing has to be waited for
        keep, held = torch.empty(count, dtype=torch.int64, device=index.device), torch.empty(count, device=index.device)
        select.select_into(place.float(), best + 1.0, keep, held)
    return index[keep], values[keep]


def entries_above(region: Tensor, threshold: Tensor) -> Picked:
    """Entries of |region| ≥ threshold, compared in float32 at least: in a smaller type a threshold may become zero."""
    index, values = select.select(
        region.to(torch.promote_types(region.dtype, torch.float32)), threshold, region.numel()
    )
    return index, values.to(region.dtype)


def pooled_threshold(region: Tensor, k: int, group: Group) -> Tensor:
    """The k-th magnitude of the whole sum from all-reduced histograms: first its eighth of an octave, then 1/1024 of
    that (an eighth alone lets up to twice too many pass)."""
    counts = all_reduce(select.histogram(region.float()).int(), group)
    counts[0] = 0  # zeros are nobody's entries
    edge = select.threshold_from(counts, k).clamp(min=SMALLEST)
    low = edge.view(torch.int32).long()
    bits = select.magnitude_bits(entries_above(region, edge)[1])
    place = ((bits - low) >> FINE_SHIFT).clamp(max=FINE_BINS)  # the last: all above this eighth of an octave
    fine = all_reduce(torch.bincount(place, minlength=FINE_BINS + 1).int(), group)
    above = fine.flip(0).cumsum(0).flip(0)
    step = (above >= k).sum().clamp(1, FINE_BINS) - 1
    return (low + (step << FINE_SHIFT)).to(torch.int32).view(torch.float32)


def _learn(state: State, which: str, exact: float, count: int, slope: float) -> None:
    """The next step's prediction, after this step's threshold turned out to be `exact`."""
    exact, slope = max(exact, SMALLEST), min(max(slope, FLATTEST), STEEPEST)
    predicted = float(state.get(f"th_{which}", exact))
    last = float(state[f"seen_{which}"][0]) if f"seen_{which}" in state else exact
    pace = math.log(float(state.get(f"pace_{which}", 1.0)))
    pace = PACE * (pace + TREND * (math.log(exact / last) - pace))
    factor = min(max(math.exp(pace), 1 / FASTEST), FASTEST)
    state[f"pace_{which}"] = torch.tensor(factor)
    state[f"th_{which}"] = torch.tensor(min(exact**LEVEL * predicted ** (1 - LEVEL) * factor, LARGEST))
    state[f"seen_{which}"] = torch.tensor([exact, count, slope], dtype=torch.float64)


# --- scope "model"


def finish_step(states: list[State], numels: list[int], k: int) -> None:
    """After a step's last exchange: every unit's share of k in the next. Everybody saw the same sums pass, so all
    members come to the same shares, and nothing is sent. states, numels: of the units; k: the whole model's."""
    known = [i for i, state in enumerate(states) if "seen_g" in state]
    seen = np.array([states[i]["seen_g"].tolist() for i in known]).reshape(-1, 3)
    for i, share in zip(known, shares(seen, np.array([numels[i] for i in known]), k)):
        states[i]["share"] = torch.tensor(int(share))


def shares(seen: Floats, numels: Ints, k: int) -> Ints:
    """int[units], their sum k: what each would select under one threshold for all, in SHIFT of the way to it.

    seen: float[units, 3], every unit's last (threshold th_i, count c_i, slope s_i). numels: int[units], their sizes.
    Under a threshold th unit i would select c_i·(th_i/th)^s_i; th is found by bisection.
    """
    thresholds, counts, slopes = np.maximum(seen, SMALLEST).T

    def wanted(log_th: float) -> Floats:
        leap = np.clip(np.exp(np.clip(SHIFT * slopes * (np.log(thresholds) - log_th), -50, 50)), 1 / LEAP, LEAP)
        return np.clip(counts * leap, 1, numels)

    if not len(numels):
        return np.zeros(0, int)
    low, high = np.log(thresholds.min()) - 50, np.log(thresholds.max()) + 50
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if wanted(middle).sum() > k else (low, middle)
    exact = wanted(high)
    out = np.floor(exact).astype(int)
    spare = min(max(k - out.sum(), 0), len(out))
    out[np.argsort(out - exact, kind="stable")[:spare]] += 1
    return np.minimum(out, numels)
