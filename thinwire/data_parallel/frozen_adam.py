"""Adam with a frozen variance and a compressed momentum.

Adam's update is not linear in the gradient, so a part of it that is sent later has another effect. Once
the variance stands still it is linear: m/√v̂ with a constant v̂. So (1-bit Adam; AQ-SGD's data-parallel half)

    warm-up:  g = mean g_i, exact;  m, v and x as AdamW
    then:     m_i = β₁·m + (1−β₁)·g_i ;  m = compressed mean of m_i, error feedback on both hops
              x ← x − lr·( m̂ / (√v̂ + ε) + λ·x ),   m̂ = m/(1−β₁ᵗ),   v̂ as it was at freezing

    optimizer = tw.optim.FrozenAdam(model.named_parameters(), lr=3e-4, freeze_after=500)

It averages over the ranks itself, so it takes *local* gradients: a plain module, or DDP under `no_sync` all the time.
Four bits are the default: on small problems they cost nothing beyond what freezing costs, one bit 1 to 28 % of loss
(docs/ddp.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs.base import is_finite
from thinwire.collectives import Dense, Quantized
from thinwire.collectives.groups import Group, world
from thinwire.collectives.messages import maximum
from thinwire.config.wire import Reduction, Wire, WireLike
from thinwire.data_parallel.checkpoint import RankState
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.parameters import describe_parameters, sparse_gradient
from thinwire.data_parallel.precompile import precompile_averaging
from thinwire.distributed.config_check import check_agreement, describe
from thinwire.errors import UsageError

SETTLED = 0.04  # "auto": ‖v‖ has changed by less than this share in the last 1/(1−β₂) steps
FLOOR = 1e-3  # of a tensor's mean variance: the least that a coordinate's may be once it is frozen


class FrozenAdam(torch.optim.Optimizer):
    """AdamW whose variance is frozen after a warm-up, and whose momentum is then averaged compressed.

        optimizer = tw.optim.FrozenAdam(model.named_parameters(), lr=3e-4, freeze_after=500)
        loss.backward(); optimizer.step()             # takes local gradients, averages over the ranks

    named_parameters: pairs of name and parameter, or parameter groups whose "params" are such pairs.
    lr, betas, eps, weight_decay: AdamW's.
    wire: for the momentum, its gradient section (default: Quantized(4)); `freeze_after` replaces its warm-up.
    freeze_after: steps of the warm-up, or "auto": until the variance's norm has settled.
    floor: the least variance after freezing, as a share: v̂ ← max(v̂, floor·mean v̂ of its tensor, or of all tensors
    where it never had a gradient). A coordinate without a gradient in the warm-up would have v = 0 for ever, and its
    first one would be divided by ε alone.
    group: the process group that is averaged over; None is torch's default one.
    seed: of stochastic rounding and of random choices, equal on all ranks.

    A non-finite gradient on any rank: no rank steps, nothing changes, `skipped` is true and `skips` counts. A parameter
    that no rank used is left alone, as AdamW leaves one without .grad. One rank alone: AdamW with its variance frozen.
    UsageError where a setting is not allowed, parameters have no names, or ranks differ in configuration.
    """

    def __init__(
        self, named_parameters: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, *,
        wire: WireLike | None = None, freeze_after: int | str = "auto", floor: float = FLOOR,
        group: Group = None, seed: int = 0,
    ) -> None:  # fmt: skip
        _check_settings(lr, betas, eps, weight_decay, freeze_after, floor)
        self.reduction = Wire.of(Quantized(4) if wire is None else wire).gradient or Reduction(Dense())
        self.freeze_after = freeze_after
        self.floor = floor
        self.group = group
        self.seed = seed
        self.size, self.rank = world(group)
        self.frozen = False
        self.skipped = False
        self.skips = 0
        self.norms: deque[float] = deque(maxlen=math.ceil(1 / (1 - betas[1])) + 1)  # ‖v̂‖₁ of the last steps
        self.exchange: Exchange | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(named_parameters, defaults)
        self._attach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's, on all ranks; not once the variance is frozen, since a new parameter has none."""
        if self.frozen:
            raise UsageError("FrozenAdam: the variance is frozen, so no parameters can be added")
        super().add_param_group(param_group)
        if "param_names" not in self.param_groups[-1]:
            raise UsageError("FrozenAdam wants named parameters, such as model.named_parameters(): names key its state")
        if self.exchange is not None:
            self._attach()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average over the ranks and update the weights. closure: computes and returns the loss, as torch's do."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bad, settled, used = self._agree()
        self.skipped = bad
        self.skips += bad
        if bad:
            return loss
        if settled and not self.frozen:
            self._freeze()
        means = self._average(used)
        if means is None:
            self.skipped = True
            self.skips += 1
            return loss
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"]):
                if name in used:
                    self._update(group, p, means[name])
        if not self.frozen and self.freeze_after == "auto":
            self.norms.append(self._variance())
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch's, the same on all ranks, and under "wire" this rank's residuals by names that hold its rank."""
        own = {"frozen": self.frozen, "norms": list(self.norms), "skips": self.skips}
        return super().state_dict() | {"freezing": own, "wire": self._per_rank.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also from another number of ranks, where "wire" holds all their parts (`tw.parallel.read_state`)."""
        if "freezing" not in state_dict or "wire" not in state_dict:
            raise UsageError(f"the state is of another optimizer than FrozenAdam: it has {', '.join(state_dict)} only")
        rest = {key: value for key, value in state_dict.items() if key not in ("freezing", "wire")}
        super().load_state_dict(rest)
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            saved = state_dict["state"].get(index, {})
            for key in {"exp_avg", "exp_avg_sq"} & saved.keys():  # which torch has cast to p's dtype
                self.state[p][key] = saved[key].to(p.device, copy=True)
        own = state_dict["freezing"]
        self.frozen, self.skips = bool(own["frozen"]), int(own["skips"])
        self.norms.clear()
        self.norms.extend(map(float, own["norms"]))
        self._per_rank.load_state_dict(state_dict["wire"])

    # --- inside

    def _attach(self) -> None:
        """The exchange of what the groups hold now; residuals are taken over by name."""
        self.parameters: dict[str, nn.Parameter] = {
            name: p for group in self.param_groups for name, p in zip(group["param_names"], group["params"])
        }
        if len(self.parameters) < sum(len(group["params"]) for group in self.param_groups):
            raise UsageError("FrozenAdam: two parameters have the same name, and names key its state")
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        config = describe(self.reduction, "wire") | {
            "seed": repr(self.seed), "freeze_after": repr(self.freeze_after), "floor": repr(self.floor),
        }  # fmt: skip
        check_agreement("FrozenAdam", config | describe_parameters(self.parameters), self.group)
        precompile_averaging("momenta", self.reduction, self.parameters, self.size)
        before = self.exchange
        self.exchange = Exchange(shapes, self.reduction, self.group, self.seed)
        if before is not None:
            self.exchange.load_state_dict(before.state_dict())
        self._per_rank = RankState(self.exchange, self.rank, self.size)

    def _agree(self) -> tuple[bool, bool, set[str]]:
        """(a gradient is not finite, freeze now, parameters in use), each as soon as one rank says so."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for name, gradient in gradients.items():
            if gradient.layout != torch.strided:
                raise sparse_gradient(name, gradient)
        bad = any(not bool(is_finite(g)) for g in gradients.values())
        flags = torch.tensor([bad, self._settled(), *(n in gradients for n in self.parameters)], dtype=torch.uint8)
        if self.size > 1:
            flags = flags.to(next(iter(self.parameters.values())).device)
            flags = maximum(flags, self.group)
        first, second, *rest = map(bool, flags.tolist())
        return first, second, {name for name, use in zip(self.parameters, rest) if use}

    def _settled(self) -> bool:
        """Is the warm-up over, as far as this rank can see? Never before there is a variance."""
        if self.frozen:
            return False
        if isinstance(self.freeze_after, int):
            steps = max((float(self.state[p]["step"]) for _, p in self._with_variance()), default=0.0)
            return steps >= self.freeze_after and self._variance() > 0
        full = len(self.norms) == self.norms.maxlen
        return full and abs(self.norms[-1] - self.norms[0]) < SETTLED * self.norms[-1]

    def _variance(self) -> float:
        """‖v̂‖₁ over all parameters."""
        return float(sum(_corrected(self.state[p], group).sum() for group, p in self._with_variance()))

    def _freeze(self) -> None:
        """v ← v̂, floored; from here on the exchange is of momenta."""
        count = sum(p.numel() for _, p in self._with_variance())
        overall = self._variance() / count
        for group in self.param_groups:
            for p in group["params"]:
                state = self._state(p)
                v = _corrected(state, group) if state["step"] else state["exp_avg_sq"]
                mean = float(v.mean()) if v.numel() else 0.0
                state["exp_avg_sq"] = v.clamp(min=self.floor * mean) if mean else v + overall
        self.frozen = True

    def _with_variance(self) -> Iterable[tuple[dict[str, Any], nn.Parameter]]:
        """(group, parameter) of those that have been updated."""
        pairs = ((group, p) for group in self.param_groups for p in group["params"])
        return ((group, p) for group, p in pairs if self.state[p].get("step"))

    def _state(self, p: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            like = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = like, like.clone()
        return state

    def _outgoing(self, name: str, beta: float) -> Tensor:
        """What this rank puts into the mean: its gradient, or its momentum."""
        p = self.parameters[name]
        m = self._state(p)["exp_avg"]
        g = torch.zeros_like(m) if p.grad is None else p.grad.to(m.dtype)
        return m.lerp(g, 1 - beta) if self.frozen else g

    def _average(self, used: set[str]) -> dict[str, Tensor] | None:
        """Means of the ranks' gradients (exact, in the warm-up) or momenta, by parameter; None: they cannot be used."""
        assert self.exchange is not None
        betas = {n: group["betas"][0] for group in self.param_groups for n in group["param_names"]}
        exact = self.size == 1 or not self.frozen
        out: dict[str, Tensor] = {}
        means = self.exchange.reduce_all(
            lambda unit: torch.cat([self._outgoing(name, betas[name]).reshape(-1) for name in unit.parameters]), exact
        )
        if means is None:
            return None
        for unit, mean in means.items():
            for name, span, shape in unit.spans():
                out[name] = mean[span].view(shape)
                if name not in used:
                    self.exchange.restore_residual(unit, span)
        self.exchange.finish_step()
        self.exchange.commit()
        return out

    def _update(self, group: dict[str, Any], p: nn.Parameter, mean: Tensor) -> None:
        """AdamW's lines, in its order; once frozen, `mean` is the momentum and v̂ stays."""
        state, (beta1, beta2), lr = self._state(p), group["betas"], float(group["lr"])
        m, v = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        p.mul_(1 - lr * group["weight_decay"])
        if self.frozen:
            m.copy_(mean)
            denominator = v.sqrt().add_(group["eps"])
        else:
            mean = mean.to(m.dtype)
            m.lerp_(mean, 1 - beta1)
            v.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            denominator = (v.sqrt() / math.sqrt(1 - beta2 ** float(state["step"]))).add_(group["eps"])
        rate = lr / (1 - beta1 ** float(state["step"]))
        if p.dtype == m.dtype:
            p.addcdiv_(m, denominator, value=-rate)
        else:
            p.sub_((rate * m / denominator).to(p.dtype))


def _corrected(state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """v̂ = v/(1−β₂ᵗ)."""
    return state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))


def _check_settings(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, freeze_after: int | str, floor: float
) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("floor", floor)):
        if not isinstance(value, (int, float, Tensor)) or not value >= 0:
            raise UsageError(f"{name} = {value!r}: must be a number, 0 or more")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"betas = {betas!r}: must be two numbers in [0, 1)")
    good = isinstance(freeze_after, int) and not isinstance(freeze_after, bool) and freeze_after > 0
    if not good and freeze_after != "auto":
        raise UsageError(f"freeze_after = {freeze_after!r}: allowed are a number of steps, 1 or more, and 'auto'")
