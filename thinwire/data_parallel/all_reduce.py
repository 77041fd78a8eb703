"""The mean of named tensors over a group, compressed, with the state in the caller's hands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.codecs.base import describe_nonfinite, is_finite
from thinwire.collectives import Dense
from thinwire.collectives.groups import Group, elastic, members, world
from thinwire.collectives.members import Elastic
from thinwire.collectives.messages import maximum
from thinwire.config.wire import Reduction, Wire, WireLike, warmup_steps
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.parameters import describe_parameters
from thinwire.distributed.config_check import check_agreement, describe
from thinwire.errors import InvalidExchange, UsageError
from thinwire.kernels.random import derive
from thinwire.memory import Plain


def all_reduce(
    named_tensors: Mapping[str, Tensor], wire: WireLike | None = None, group: Group = None,
    state: dict[str, Tensor] | None = None, *, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """name → mean over the group, for outer gradients of local-step methods and for anything else.

        state = {}
        means = tw.all_reduce({"x": x}, tw.collectives.Quantized(4), state=state)

    named_tensors: name → tensor; names, shapes and types are the same on all ranks.
    wire: a tw.Wire (its gradient section is used), a preset's name, a collective, or a table as TOML gives it. It must
    be given: what may be lost is the caller's to say.
    group: the process group that is averaged over; None is torch's default one. On a quorum (tw.elastic.Quorum) the
    state is replaced when the step's vote says that it counts, and where the exchange fails the vote will be no.
    state: a dict of tensors, empty at first, whose contents this call replaces: residuals by name and the collective's
    own. Pass it again for the same tensors; save it with the rest of a checkpoint (it is this rank's). Without it what
    a lossy collective leaves out is lost.
    seed: of stochastic rounding and of random choices, equal on all ranks.

    ValueError on all ranks where any gives NaN or Inf, and the state is unchanged. UsageError where an argument is not
    allowed, or ranks differ.
    """
    if not isinstance(named_tensors, Mapping):
        raise UsageError(f"all_reduce takes tensors by name, {{name: tensor}}, not {type(named_tensors).__name__}")
    if wire is None:
        raise UsageError(
            "all_reduce(tensors, wire): the wire is missing: give a collective such as tw.collectives.Quantized(4), a "
            "Wire, or a preset's name (off is exact)"
        )
    reduction = Wire.of(wire).gradient or Reduction(Dense())
    quorum = elastic(group)
    if quorum is not None:
        return _in_quorum(quorum, named_tensors, reduction, state, seed)
    means, left = _reduce(named_tensors, reduction, group, state, seed)
    if state is not None and left is not None:
        state.clear()
        state.update(left)
    return means


def _reduce(
    named_tensors: Mapping[str, Tensor], reduction: Reduction, group: Group, state: dict[str, Tensor] | None, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """(the means, the new state; None: it stays)."""
    exchange = Exchange({name: tuple(t.shape) for name, t in named_tensors.items()}, reduction, group, seed)
    if state:
        exchange.load_state_dict(state)
    how = describe(replace(reduction, memory=Plain()), "gradient")  # a memory's own shift may be each rank's own
    _check_together(named_tensors, how | {"seed": repr(seed)}, group)
    if world(group)[0] == 1:
        return {name: t.clone() for name, t in named_tensors.items()}, None
    quorum = elastic(group)
    if quorum is not None and int((state or {}).get("quorum", -1)) != quorum.number:
        mine = torch.tensor([exchange.steps, exchange.has_shifts])
        steps, shifted = maximum(mine, quorum).tolist()
        exchange.rejoin(quorum, steps, bool(shifted), next(iter(named_tensors.values())).device)
    exact = exchange.steps < warmup_steps("gradient", reduction)
    means = exchange.reduce_all(lambda unit: torch.cat([_working(named_tensors[n]) for n in unit.parameters]), exact)
    if means is None:
        raise ValueError("all_reduce: a mean or residual left the range of its type on some rank; nothing was changed")
    out: dict[str, Tensor] = {}
    for unit, mean in means.items():
        out |= {name: mean[span].view(shape).to(named_tensors[name].dtype) for name, span, shape in unit.spans()}
    exchange.finish_step()
    exchange.commit()
    return {name: out[name] for name in named_tensors}, exchange.state_dict()


def _in_quorum(
    quorum: Elastic, named_tensors: Mapping[str, Tensor], reduction: Reduction, state: dict[str, Tensor] | None,
    seed: int,
) -> dict[str, Tensor]:  # fmt: skip
    """The means; what went wrong is reported to the quorum, whose vote will be no, and the tensors come back as they
    are."""
    try:
        means, left = _reduce(named_tensors, reduction, quorum, state, seed)
    except UsageError:
        raise
    except (RuntimeError, ValueError) as error:  # a member was lost, or values are not finite
        quorum.report(InvalidExchange(str(error)) if isinstance(error, ValueError) else error)
        return {name: t.clone() for name, t in named_tensors.items()}

    def settle(counts: bool) -> None:
        if counts and state is not None and left is not None:
            state.clear()
            state.update(left | {"quorum": torch.tensor(quorum.number)})

    quorum.stage(settle)
    return means


def _working(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).to(torch.promote_types(x.dtype, torch.float32))


def _check_together(named_tensors: Mapping[str, Tensor], how: dict[str, str], group: Group) -> None:
    """By one small all-reduce: is anybody's tensor not finite, does anybody mean another exchange than the others?"""
    mine = how | describe_parameters(named_tensors)
    bad = {name: t for name, t in named_tensors.items() if not bool(is_finite(_working(t)))}
    digest = derive(*mine.items())
    found = torch.tensor([bool(bad), digest, -digest])
    if world(group)[0] > 1:
        found = found.to(next((t.device for t in named_tensors.values()), "cpu"))
        members(group).all_reduce(found, torch.distributed.ReduceOp.MAX)
    anywhere, most, least = found.tolist()
    if most != -least:
        check_agreement("all_reduce", mine, group)
    if anywhere:
        here = "; ".join(f"{name}: {describe_nonfinite(t)}" for name, t in bad.items()) or "on another rank"
        raise ValueError(f"all_reduce: not finite: {here}")
