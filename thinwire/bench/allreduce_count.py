"""How many entries Ok-Topk selects in a real training run, and ξ beside it.

    python -m thinwire.bench.allreduce_count --json out/count.json --figure docs/figures/oktopk-count.png

A small character-level transformer learns the source text of Python's own argparse module on four ranks with AdamW and
error feedback; its gradients are exchanged in several units, once with a threshold for each unit and once with one for
the whole model, or by the paper's own rule (--thresholds).

Two numbers are called ξ here. Both have ‖Topk(mean acc) − Topk(mean Topk(acc))‖ above the line, acc being residual +
gradient. "of the gradient" is the paper's Assumption 1, with the norm of the mean gradient below it; "of acc" has the
norm of the mean acc, and says which share of what could be sent the selection misses.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from thinwire.codecs import TopK
from thinwire.collectives.oktopk import SCOPES, THRESHOLDS, OkTopk, xi
from thinwire.lab.network import Network
from thinwire.memory import ErrorFeedback
from thinwire.memory.channel import Channel
from thinwire.terminal import write_json

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 96, 4, 2, 48, 8
UNIT = 40_000  # values: parameters are joined until there are so many
LIMIT = 900.0  # seconds for a run
BAND = 0.11  # the paper's
BELOW = {"acc": "÷ ‖mean acc‖", "gradient": "÷ ‖mean gradient‖, the paper's"}  # what ξ is divided by


class Characters(nn.Module):
    """A causal transformer over bytes below 128."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), nn.Linear(WIDTH, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Logits float[rows, CONTEXT, 128] of `x`, int64[rows, CONTEXT]."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.out(self.layers(self.embed(x) + self.place, mask=mask, is_causal=True))


def train(density: float, scope: str, steps: int, xi_every: int, lr: float, rule: str) -> dict[str, Any]:
    """What every rank runs; returns per step the loss, and the counts selected over all units, locally and globally.

    `density`, `scope`, `rule` (its thresholds): of OkTopk. `steps`: how many. `xi_every`: steps between two
    measurements of ξ; 0: none. `lr`: the learning rate."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    text = torch.tensor([min(ord(c), 127) for c in inspect.getsource(argparse)])
    torch.manual_seed(0)
    model = Characters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    units = _units(list(model.parameters()))
    collective = OkTopk(density, scope=scope, values="fp32", indices="coded", thresholds=rule)
    channels = [Channel(collective, ErrorFeedback()) for _ in units]
    out: dict[str, Any] = {"loss": [], "local": [], "global": [], **{f"xi of {below}": [] for below in BELOW}}
    numels = [sum(p.numel() for p in unit) for unit in units]
    shares = [TopK(density).count(n) for n in numels]
    out["k"] = TopK(density).count(sum(numels)) if scope == "model" else sum(shares)
    for step in range(steps):
        start = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = text[start + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        states, misses = _reduce(units, channels, collective, numels, bool(xi_every) and step % xi_every == 0)
        optimizer.step()
        selected = torch.stack([state["selected"] for state in states])
        out["loss"].append(float(loss.detach()))
        for name, column in (("local", 0), ("global", 1)):
            out[name].append(int(selected[:, column].sum()))
            if scope == "unit":  # the worst unit's deviation
                worst = max((abs(int(c) / k - 1), int(c) / k) for c, k in zip(selected[:, column], shares))
                out.setdefault(f"{name}_worst", []).append(worst[1])
        for below, missed in misses.items():
            out[f"xi of {below}"].append(sum(missed) / len(missed) if missed else None)
    dist.destroy_process_group()
    return out


def _reduce(
    units: list[list[Tensor]], channels: list[Channel], collective: OkTopk, numels: list[int], measured: bool
) -> tuple[list[Any], dict[str, list[float]]]:
    """Average the gradients in place, unit by unit; (the units' states after the step, both ξ of each if measured)."""
    misses: dict[str, list[float]] = {below: [] for below in BELOW}
    for channel in channels:
        channel.begin()
    for unit, channel in zip(units, channels):
        gradient = torch.cat([p.grad.reshape(-1) for p in unit if p.grad is not None])
        residual = channel.state.read("e", "u")
        mean = channel.reduce("u", gradient)
        if measured:
            acc = gradient if residual is None else gradient + residual
            passed = int(channel.staged_collective["u"]["selected"][1])
            for below, divisor in zip(BELOW, (None, gradient)):
                misses[below].append(float(xi(acc, mean, passed, gradient=divisor)))
        for p, part in zip(unit, mean.split([p.numel() for p in unit])):
            p.grad = part.view(p.shape)
    states = [channel.staged_collective["u"] for channel in channels]
    collective.finish_step(states, numels)
    for channel in channels:
        channel.commit()
    return states, misses


def _units(parameters: list[Any]) -> list[list[Any]]:
    units: list[list[Any]] = [[]]
    for parameter in parameters:
        if sum(p.numel() for p in units[-1]) >= UNIT:
            units.append([])
        units[-1].append(parameter)
    return units


def draw(runs: dict[str, list[dict[str, Any]]], path: str) -> None:
    """Draw `runs` (per scope the results of all ranks) to `path`: counts of all units over k, every rank's, and ξ."""
    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    axes = figure.subplots(2, len(runs), sharex=True, sharey="row", squeeze=False)
    for (scope, ranks), (top, bottom) in zip(runs.items(), axes.T):
        for r, rank in enumerate(ranks):
            top.plot([c / rank["k"] for c in rank["local"]], color="#56B4E9", lw=0.7, label="" if r else "local")
        top.plot([c / ranks[0]["k"] for c in ranks[0]["global"]], color="#D55E00", lw=0.9, label="global")
        top.axhspan(1 - BAND, 1 + BAND, color="#888888", alpha=0.2, label=f"± {100 * BAND:.0f} %")
        top.set(title=f'scope="{scope}"', ylabel="selected ÷ k, all units")
        top.legend()
        for below, color in zip(BELOW, ("#009E73", "#CC79A7")):
            bottom.plot(ranks[0][f"xi of {below}"], color=color, label=f"÷ ‖mean {below}‖")
        bottom.set(xlabel="step", ylabel="ξ, mean over units", yscale="log")
        bottom.legend()
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def summary(rank: dict[str, Any]) -> str:
    """One line about what `rank` returned: how far counts were from k."""
    words = []
    for name in ("local", "global"):
        off = [abs(c / rank["k"] - 1) for c in rank[name]]
        mean = sum(rank[name]) / len(off) / rank["k"]
        outside = sum(o > BAND for o in off)
        words.append(f"{name} {mean:.3f} k, off by at most {max(off):.1%}, by more than {BAND:.0%} in {outside} steps")
    late = len(rank["loss"]) // 2
    for below, meaning in BELOW.items():
        seen = [value for value in rank[f"xi of {below}"][late:] if value is not None]
        if seen:
            words.append(f"ξ of {below} ({meaning}) {min(seen):.2f} to {max(seen):.2f} in the second half")
    return "; ".join(words) + f"; loss {rank['loss'][0]:.3f} → {sum(rank['loss'][-20:]) / 20:.3f}"


def main() -> None:
    """Train with both scopes as the command line says, print a line about each, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--xi-every", type=int, default=1)
    parser.add_argument("--thresholds", choices=THRESHOLDS, default="predicted")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--figure", metavar="PATH")
    args = parser.parse_args()
    runs = {}
    with Network(hosts=args.hosts, preload=("thinwire.bench.allreduce_count",)) as net:
        for scope in SCOPES if args.thresholds == "predicted" else SCOPES[:1]:
            settings = (args.density, scope, args.steps, args.xi_every, args.lr, args.thresholds)
            runs[scope] = list(net.run(train, *settings, timeout=LIMIT, echo=False))
            print(f"{scope}: k = {runs[scope][0]['k']:,}; {summary(runs[scope][0])}")
    write_json(args.json, {**vars(args), "runs": runs})
    if args.figure:
        draw(runs, args.figure)


if __name__ == "__main__":
    main()
