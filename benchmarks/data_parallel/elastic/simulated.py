"""What a death costs local steps, without a network: one_run.py's model, samples and rounds in one process.

    python benchmarks/data_parallel/elastic/simulated.py --deaths 10                      # as members do it
    python benchmarks/data_parallel/elastic/simulated.py --deaths 10 --residual zero      # one effect at a time

Sites exchange by thinwire's own exchange, in threads (collectives/in_process.py). A site dies in a round, whose samples
are lost; is away for `--away` rounds; and comes back, for one round without weight. `--residual`: what it then has
not sent: zero; donor: a copy of a survivor's; kept: its own, which no real one has. `--moments`: donor's, anew, kept.
`--order`: other samples in another order, with the same weights at the beginning and the same deaths.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from member import BATCH, EVERY, LOCAL, RATE, NextByte, batch, generator, text

from thinwire.collectives import Dense
from thinwire.collectives.groups import ALONE
from thinwire.collectives.in_process import InProcess, InProcessGroup
from thinwire.config.local import Local
from thinwire.config.wire import Reduction
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_units import Unit, make_units
from thinwire.local_steps.fragment import Fragment
from thinwire.local_steps.round import reduce_unit


class SimulatedSite:
    """A site, whether it is there or not."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(run.options["seed"])
        self.model = NextByte(run.options["width"])
        self.adam = torch.optim.Adam(self.model.parameters(), RATE)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        run.units = run.units or make_units(shapes, run.reduction)
        self.exchange = Exchange(shapes, run.reduction, ALONE, run.options["seed"], units=run.units)
        named = dict(self.model.named_parameters())
        self.fragment = Fragment(0, named, run.units, run.settings, None, lambda unit: None)
        self.away = 0  # rounds until it comes back
        self.weight = 1.0  # in its next round

    def train(self, g: torch.Generator, data: Tensor, rate: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = rate
        for _ in range(EVERY):
            x, y = batch(data, g, BATCH)
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.adam.step()
            self.adam.zero_grad()

    def come_back(self, donor: SimulatedSite, options: dict[str, Any]) -> None:
        if options["moments"] == "anew":
            self.adam = torch.optim.Adam(self.model.parameters(), RATE)
        elif options["moments"] == "donor":
            self.adam.load_state_dict(copy.deepcopy(donor.adam.state_dict()))
        self.fragment.outer.load_state_dict(copy.deepcopy(donor.fragment.outer.state_dict()))
        for mine, theirs in zip(self.fragment.anchors.values(), donor.fragment.anchors.values()):
            mine.data.copy_(theirs.data)
        self.fragment.take_anchor()
        for unit, channel in self.exchange.channels.items():
            left = donor.exchange.channels[unit].state.read("e", unit.name)
            if left is not None and options["residual"] != "kept":
                left = left.clone() if options["residual"] == "donor" else torch.zeros_like(left)
                channel.state.write("e", unit.name, left)


class Run:
    """One run."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.settings = Local.of(LOCAL[options["method"]])
        self.reduction = self.settings.wire.gradient or Reduction(Dense())
        self.units: list[Unit] = []
        self.data, self.held_out = text()
        self.sites = [SimulatedSite(self) for _ in range(options["members"])]
        self.samples = 0  # batches of ten that counted
        self.steps = 0
        self.there: list[int] = []
        self.group = InProcessGroup(1)
        steps = options["steps"]
        chances = [random.Random(1000 * options["seed"] + i + 1) for i in range(options["members"])]
        self.deaths = [
            set(chance.sample(range(steps // 10, steps - steps // 10), options["deaths"])) for chance in chances
        ]

    @property
    def progress(self) -> float:
        return self.samples / (self.options["steps"] * self.options["members"])

    def round(self) -> None:
        there = [i for i, site in enumerate(self.sites) if not site.away]
        seed = self.options["seed"] + 1000 * self.options["order"]
        for place, i in enumerate(there):
            if self.sites[i].weight:
                rate = RATE * max(0.02, 1 - self.progress)
                self.sites[i].train(generator(seed, self.samples + place), self.data, rate)
        dying = [i for i in there if self.steps in self.deaths[i]][: max(0, len(there) - 2)]
        coming = [i for i, site in enumerate(self.sites) if site.away == 1]
        alive = [i for i in there if i not in dying]
        for i in coming:
            self.sites[i].come_back(self.sites[alive[0]], self.options)
            self.sites[i].weight = 0.0
        for site in self.sites:
            site.away = max(0, site.away - 1)
        for i in dying:
            self.sites[i].away = self.options["away"] + 1
        self.exchange(sorted(alive + coming))
        self.steps += 1

    def exchange(self, now: list[int]) -> None:
        if now != self.there:
            self.there, self.group = now, InProcessGroup(len(now))
            for member, i in zip(self.group.members, now):
                self.sites[i].exchange.rejoin(member, self.steps, False, torch.device("cpu"))
        present = [self.sites[i] for i in now]
        weights = [site.weight for site in present]

        def one(member: InProcess) -> None:
            site = present[member.rank]
            factor = len(now) * site.weight / sum(weights)
            deltas = site.fragment.outer_gradient()
            means = {u: reduce_unit(site.exchange, u, x, factor, False) for u, x in deltas.items()}
            site.exchange.finish_step()
            site.exchange.commit()
            site.fragment.step(means)
            site.fragment.take_base()

        self.group.run(one)
        self.samples += round(sum(weights))
        for site in present:
            site.weight = 1.0

    def loss(self) -> float:
        x, y = batch(self.held_out, torch.Generator().manual_seed(0), 8192)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.sites[self.there[0]].model(x), y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--deaths", type=int, default=0, help="of each member")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--width", type=int, default=400)
    parser.add_argument("--method", choices=LOCAL, default="local")
    parser.add_argument("--away", type=int, default=2, help="rounds")
    parser.add_argument("--residual", choices=("zero", "donor", "kept"), default="donor")
    parser.add_argument("--moments", choices=("donor", "anew", "kept"), default="donor")
    parser.add_argument("--order", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)
    run = Run(options)
    while run.progress < 1:
        run.round()
    print(json.dumps(options | {"rounds": run.steps, "loss": run.loss()}), flush=True)


if __name__ == "__main__":
    main()
