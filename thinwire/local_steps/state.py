"""Checkpoints of local steps: everything in which one site differs from another, and what they share.

Names, after "rank<r>of<P>/": `step`, `tokens`, `weight/…`, `inner/…`, `anchor/…`, `outer/…`, `exchange/…` (residuals),
and of a fragment that is under way `flight/<number>`, `sent/…` and `mean/…`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.config.local import CARRY
from thinwire.data_parallel.checkpoint import split
from thinwire.data_parallel.gradient_units import Unit
from thinwire.errors import UsageError
from thinwire.local_steps.fragment import Fragment, own_part
from thinwire.local_steps.round import Round

State = dict[str, Tensor]
NUMBER = "#"  # before the name of an optimiser's value that is no tensor


def part_of(
    state: Mapping[str, Any], shard: str | None, rank: int, sites: int, elastic: bool = False
) -> tuple[State, State, bool]:  # fmt: skip
    """(the exchange's part of all sites, what this site goes on from, is that its own?) of LocalSteps' state.

    shard: this rank's part of the model, if it is in parts. rank, sites: this site of how many. elastic: sites come and
    go, and one part alone is this site's. UsageError where the state has no part for it.
    """
    if shard is not None and shard not in state:
        raise UsageError(f"this rank is {shard}, the state is of {', '.join(state) or 'none'}")
    named: Mapping[str, Tensor] = state if shard is None else state[shard]
    old, ranks = split(named)
    if elastic and len(ranks) == 1:
        old, (rank,) = sites, ranks
    same = old == sites
    if same and rank not in ranks:
        raise UsageError(f"the state has no part for site {rank} of {old}")
    exchanged = {name.replace("/exchange/", "/", 1): value for name, value in named.items() if "/exchange/" in name}
    return exchanged, ranks[rank] if same else ranks[min(ranks)], same


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor], prefix: str) -> State:
    """ "<prefix>/<parameter>/<entry>" → tensor; numbers as tensors, by names that say so."""
    out: State = {}
    for name, parameter in named.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                out[f"{prefix}/{name}/{entry}"] = own_part(value).clone()
            elif isinstance(value, (int, float)):
                out[f"{prefix}/{name}/{NUMBER}{entry}"] = torch.tensor(value, dtype=torch.float64)
            elif value is not None:
                raise UsageError(f"{type(optimizer).__name__} keeps {entry} as {type(value).__name__}: not supported")
    return out


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, named: Mapping[str, Tensor], prefix: str, state: Mapping[str, Tensor]) -> None:
    """The inverse; entries that the state does not have are forgotten."""
    for name, parameter in named.items():
        start = f"{prefix}/{name}/"
        found = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
        entries: dict[str, Tensor | int | float] = {}
        for entry, value in found.items():
            if entry.startswith(NUMBER):
                entries[entry.removeprefix(NUMBER)] = float(value) if value % 1 else int(value)
            elif value.shape == own_part(parameter).shape and value.dim():
                like = torch.empty_like(parameter, dtype=value.dtype)
                own_part(like).copy_(value)
                entries[entry] = like
            else:
                entries[entry] = value.clone()
        optimizer.state[parameter] = entries


def site_state(inner: Optimizer, parameters: Mapping[str, Tensor], fragments: list[Fragment]) -> State:
    """The inner optimiser's state, and the fragments'."""
    return optimizer_state(inner, parameters, "inner") | fragment_states(fragments)


def fragment_states(fragments: list[Fragment]) -> State:
    """Weights, anchors, the outer optimisers' state, and the tokens since each was sent."""
    out = {"tokens": torch.tensor([fragment.tokens for fragment in fragments], dtype=torch.float64)}
    for fragment in fragments:
        out |= {f"weight/{name}": weight.clone() for name, weight in fragment.weights().items()}
        out |= {f"anchor/{name}": anchor.detach().clone() for name, anchor in fragment.anchors.items()}
        out |= optimizer_state(fragment.outer, fragment.anchors, "outer")
    return out


def load_fragments(fragments: list[Fragment], state: Mapping[str, Tensor]) -> dict[int, Round]:
    """The inverse: those under way, by their number. UsageError where a parameter is missing, or has another shape."""
    if state["tokens"].numel() != len(fragments):
        raise UsageError(f"the state of local steps is of {state['tokens'].numel()} fragments, not of {len(fragments)}")
    found = {}
    for fragment in fragments:
        _load_fragment(fragment, state)
        under_way = _load_round(fragment, state)
        if under_way is not None:
            found[fragment.number] = under_way
    return found


@torch.no_grad()
def _load_fragment(fragment: Fragment, state: Mapping[str, Tensor]) -> None:
    weights = fragment.weights()
    for name, anchor in fragment.anchors.items():
        saved = state.get(f"anchor/{name}")
        if saved is None or saved.shape != anchor.shape:
            about = "is not in it" if saved is None else f"is of shape {tuple(saved.shape)}, not {tuple(anchor.shape)}"
            raise UsageError(f"the state of local steps is of another model: {name} {about}")
        anchor.copy_(saved)
        weights[name].copy_(state[f"weight/{name}"])
    load_optimizer(fragment.outer, fragment.anchors, "outer", state)
    fragment.tokens = float(state["tokens"][fragment.number])


def round_state(round: Round) -> State:
    """A fragment under way, whose mean has arrived."""
    out = {f"flight/{round.fragment}": torch.tensor([round.step, round.returns, round.dropped])}
    out |= {f"sent/{name}": value.clone() for name, value in round.sent.items()}
    for unit, mean in round.means.items():
        out |= {f"mean/{name}": mean[span].view(shape).clone() for name, span, shape in unit.spans()}
    return out


def _load_round(fragment: Fragment, state: Mapping[str, Tensor]) -> Round | None:
    about = state.get(f"flight/{fragment.number}")
    if about is None:
        return None
    step, returns, dropped = about.tolist()
    round = Round(fragment.number, step, {}, 0.0, returns=bool(returns), dropped=bool(dropped))
    names = fragment.parameters
    round.sent = {n: state[f"sent/{n}"].to(fragment.device) for n in names if f"sent/{n}" in state}
    if not dropped:
        round.means = {unit: _joined(unit, state, fragment.home) for unit in fragment.units}
    round.arrived.set()
    return round


def _joined(unit: Unit, state: Mapping[str, Tensor], device: torch.device) -> Tensor:
    return torch.cat([state[f"mean/{name}"].reshape(-1) for name in unit.parameters]).to(device)


def forget_nonfinite(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Zeros for what an optimiser remembers of these parameters and is not finite: NaN would come back with it."""
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and not bool(torch.isfinite(own_part(value)).all())
            ):
                own_part(value).zero_()


def bring(fragment: Fragment, round: Round, mix: str | float, inner: Optimizer) -> None:
    """θ after a round. Where this site's Δ was not finite, or the round was dropped, it returns to where the last round
    had left it: the anchor, less what it keeps of its residual.

    fragment: whose round it was. mix: LocalSteps'. inner: the inner optimiser.
    """
    if round.returns:
        forget_nonfinite(inner, fragment.parameters.values())
    unmoved = mix == CARRY and not round.sent  # it is applied at once
    if round.returns or round.dropped or unmoved or mix == 0:
        fragment.take_base()
    else:
        fragment.mix(round.sent, mix)
