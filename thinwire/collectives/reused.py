"""Ok-Topk's thresholds by the paper's own rule: found every τ′ exchanges, and reused in between.

All that passes is selected, so counts follow the residuals and the gradients: they leave k where these grow, as
residuals do for a hundred steps and more. The authors' code therefore moves a threshold a little after every exchange
whose count was far from k; so does `nudges`. thresholds.py is the rule that keeps k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.base import State
from thinwire.collectives.groups import Group
from thinwire.collectives.messages import gather
from thinwire.collectives.regions import Picked
from thinwire.collectives.thresholds import SMALLEST, entries_above, pooled_threshold
from thinwire.kernels import select

FEWEST, MOST = 2 / 3, 5 / 4  # of k: counts beyond these move the threshold
NUDGE = 1.036  # by this factor; the authors' code has 1.008 to 1.036


@dataclass(frozen=True)
class Reused:
    """nudges: whether thresholds move between two that are found."""

    nudges: bool

    def pick(self, flat: Tensor, k: int, state: State, again: bool) -> Picked:
        """This member's entries of |flat| ≥ th_l, in index order; `again`: the k largest, whose least is th_l.

        flat: float[n]. k: how many should pass. state: the unit's, which holds th_l."""
        if again or "th_l" not in state:
            picked = select.top(flat, k)
            least = float(picked[1].abs().min())
            state["th_l"] = torch.tensor(max(least, SMALLEST))
        else:
            picked = select.select(flat, float(state["th_l"]), flat.numel())
        self._keep(state, "l", picked[0].numel(), k)
        return picked

    def pick_sums(self, region: Tensor, k: int, state: State, group: Group, again: bool) -> tuple[Picked, list[int]]:
        """This member's sums of magnitude ≥ th_g, and how many every member has; arguments as of
        `thresholds.pick_sums`."""
        if again or "th_g" not in state:
            state["th_g"] = pooled_threshold(region, k, group).cpu()
        picked = entries_above(region, state["th_g"].to(region.device))
        held = torch.cat(gather(torch.tensor([picked[0].numel()], device=region.device), group)).tolist()
        self._keep(state, "g", sum(held), k)
        return picked, held

    def _keep(self, state: State, which: str, count: int, k: int) -> None:
        """The threshold for the next exchange, after so many have passed this one; and what was seen of it."""
        threshold = float(state[f"th_{which}"])
        state[f"seen_{which}"] = torch.tensor([threshold, count, 1.0], dtype=torch.float64)
        if self.nudges and count > MOST * k:
            threshold *= NUDGE
        elif self.nudges and count < FEWEST * k:
            threshold /= NUDGE
        state[f"th_{which}"] = torch.tensor(threshold)
