"""`thinwire demo`: a training run in a few minutes on one machine, first as torch sends it, then compressed.

Four ranks (two replicas of a pipeline of two stages) fine-tune a small Llama-class model on some source of Python's own
library, over emulated links of --rate, --latency and --loss on this machine (`thinwire lab`). The model is pre-trained
first, for half a minute on other source, without a slow network. The same run is then done twice: with nothing
compressed, and with the preset `max`. At the end a table is printed and a page with figures is written.

With --local-steps the four ranks are two sites, as two data centres or two homes, each a pipeline of two stages.
Inside a site links are fast; between the sites they are of --rate, --latency and --loss. The training is done first
with `max`, which averages compressed gradients over that link after every step, then with `local-max`: each site
trains by itself, and they average what they have moved, compressed further, every 5 steps (docs/local-steps.md).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import UsageError
from thinwire.installed import check_figures, check_training
from thinwire.lab.topology import HostLink, in_sites, make_link
from thinwire.quantities import show_bytes, show_rate
from thinwire.terminal import progress, table, write_json

if TYPE_CHECKING:
    from thinwire.report.runs import Run

EVERY = 5  # steps between two averages of the sites

TOML = """\
# Written by `thinwire demo`; try it yourself: thinwire train {name}.toml --local 4 {links} --out out/mine
[model]
{model}
[data]
seq_len = 128
tokenizer = "bytes"
corpus_bytes = {corpus}
samples = {samples}
held_out = {held_out}
[mesh]
{mesh}
pp = 2
microbatches = 4
[optim]
batch = 16
steps = {steps}
warmup = 5
lr = {lr}
[run]
out = "{out}"
eval_every = {every}
checkpoint_every = 0
[wire]
preset = "{wire}"
{local}"""
LOCAL = f"""\
[local]                      # between the sites; [wire] is inside a site
preset = "local-max"
every = {EVERY}
"""
NEW = "hidden = 128\nlayers = 4\nheads = 4"
PRETRAIN = 150  # steps of the pre-training


@dataclass(frozen=True)
class Comparison:
    """Two runs that differ in one thing.

    names: of the runs, the first is what the second is compared with. sites: two sites, and a slow link between them.
    more: how many times as many steps the second makes. samples, held_out: of the data, and the share of it that is
    evaluated on.
    steps, latency, out: what the options are where they are not given.
    """

    names: tuple[str, str]
    sites: bool
    more: int
    samples: int
    held_out: float
    steps: int
    latency: str
    out: str


PER_STEP = Comparison(("off", "max"), False, 1, 226, 0.15, 42, "0ms", "out/demo")
BETWEEN_SITES = Comparison(("max", "local-max"), True, 3, 3200, 0.02, 60, "50ms", "out/demo-local")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `thinwire demo` on its parser."""
    parser.description = __doc__
    parser.add_argument(
        "--local-steps",
        action="store_true",
        help="two sites: max after every step beside local-max, which averages seldom",
    )
    parser.add_argument("--rate", default="10mbit", help="of every host's, or site's, link (default 10mbit)")
    parser.add_argument("--latency", help="one way between hosts, or sites (default 0ms, with --local-steps 50ms)")
    parser.add_argument("--loss", default="0%", help="packets lost on their way, such as 0.1%% (default 0%%)")
    parser.add_argument("--steps", type=int, help="of each run (default 42, with --local-steps 60)")
    parser.add_argument("--out", help="folder of runs and page (default out/demo, with --local-steps out/demo-local)")
    parser.add_argument("--json", metavar="PATH", help="write the table there")
    parser.add_argument("--watch", action="store_true", help="serve a page that follows both runs (thinwire watch)")


def watched(args: argparse.Namespace) -> list[Path]:
    """The folders of the runs that are compared."""
    shown = _chosen(args)
    return [Path(args.out or shown.out) / name for name in shown.names]


def _chosen(args: argparse.Namespace) -> Comparison:
    return BETWEEN_SITES if args.local_steps else PER_STEP


def run(args: argparse.Namespace) -> int:
    """Pre-train, train both ways, print the table and write the report; the exit status."""
    shown = _chosen(args)
    link = make_link({"rate": args.rate, "latency": args.latency or shown.latency, "loss": args.loss}, "")
    steps = shown.steps if args.steps is None else args.steps
    if steps < 12:
        raise UsageError(f"--steps {steps}: at least 12 are needed to see anything")
    from thinwire.lab import check

    check_training()
    check_figures("the report at its end")
    finding = check()[0]
    folder = Path(args.out or shown.out)
    _clear(folder)
    paths = _write_configs(folder, shown, args.rate, link, steps)
    if finding.ok:
        where = "two sites with a link" if shown.sites else "links"
        plan = " then ".join(f"{name} for {count} steps" for name, count in _steps(shown, steps).items())
        print(f"Fine-tuning on {where} of {_words(link)}: {plan}.")
        _in_the_lab(paths, shown, args.rate, link)
    else:
        print(f"This machine forbids network namespaces: {finding.detail}. {finding.remedy}")
        simulated = "" if shown.sites else "; what a slow network would do is simulated below"
        print(f"So both runs are on loopback, as fast as it is{simulated}.")
        _on_loopback(paths)
    from thinwire.report.command import report
    from thinwire.report.runs import read_runs

    runs = read_runs([folder / name for name in shown.names])
    if finding.ok:  # the trainer records the rate; it does not know the others
        links = {"latency": link.latency, "loss": link.loss}
        runs = [replace(run, about={**run.about, **links}) for run in runs]
    document = report(runs, folder / "report.html")
    if shown.sites:
        _show_sites(runs)
    elif not finding.ok:
        _show_simulated(runs, link)
    settings = {"rate": link.up, "latency": link.latency, "loss": link.loss, "shaped": finding.ok}
    write_json(args.json, settings | document)
    print(f"Look at {folder / 'report.html'}; the runs are in {folder}, with their configuration to change.")
    return 0


def _steps(shown: Comparison, steps: int) -> dict[str, int]:
    """Of each run by name."""
    return dict(zip(shown.names, (steps, shown.more * steps)))


def _words(link: HostLink) -> str:
    """A link as the user would write it."""
    late = f", {1e3 * link.latency:g} ms" if link.latency else ""
    lost = f", {100 * link.loss:g} % loss" if link.loss else ""
    return f"{show_rate(link.up)}{late}{lost}"


def _clear(folder: Path) -> None:
    """Make the folder empty; only what an earlier demo made is removed."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "pretrain.toml").exists():
        raise UsageError(f"--out {folder}: holds files that are not a demo's; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot make that folder: {error.strerror}") from None


def _write_configs(folder: Path, shown: Comparison, rate: str, link: HostLink, steps: int) -> list[Path]:
    """Write pretrain.toml and one configuration per run into the folder; their paths."""
    late = f" --latency {1e3 * link.latency:g}ms" if link.latency else ""
    common = {"links": f"--rate {rate}{late}", "mesh": "dp = 2", "local": ""}
    first = {"name": "pretrain", "wire": "off", "model": NEW, "corpus": 1_000_000, "samples": 0, "steps": PRETRAIN,
             "lr": 3e-3, "every": PRETRAIN, "held_out": 0.15, **common}  # fmt: skip
    tuned = {"model": 'path = "pretrain/model"', "corpus": 2_000_000, "samples": shown.samples, "lr": 5e-4}
    tuned |= {"held_out": shown.held_out}
    counts = _steps(shown, steps).items()
    runs = [{"name": name, "wire": name, "steps": some, "every": max(1, some // 8)} for name, some in counts]
    tables = [first, *({**tuned, **common, **run} for run in runs)]
    if shown.sites:
        tables[-1] |= {"wire": "max", "mesh": "sites = 2", "local": LOCAL}
    paths = []
    for values in tables:
        paths.append(folder / f"{values['name']}.toml")
        paths[-1].write_text(TOML.format(**values, out=folder / str(values["name"])))
    return paths


def _in_the_lab(paths: list[Path], shown: Comparison, rate: str, link: HostLink) -> None:
    """Train by every configuration: on links of that rate, latency and loss, but the pre-training on fast ones."""
    from thinwire.lab import Network
    from thinwire.train.config.sections import load
    from thinwire.train.folder_lock import locked
    from thinwire.train.local import PRELOAD, train_local
    from thinwire.train.rank import record

    with ExitStack() as stack:
        near = far = stack.enter_context(Network(hosts=4, preload=PRELOAD))
        if shown.sites:
            far = stack.enter_context(Network(topology=in_sites(2, 2, link), preload=PRELOAD))
        elif link.delayed:
            far = stack.enter_context(Network(hosts=4, latency=link.latency, loss=link.loss, preload=PRELOAD))
        for path in paths:
            config = load(path)
            slow, network = (rate, far) if path.stem in shown.names else ("unlimited", near)
            for host in range(4) if not shown.sites else ():
                network.set_rate(host, slow)
            label = path.stem if path.stem in shown.names else "pre-training"
            with locked(config.run.out):
                record(config, str(path))
                train_local(config, rate=slow, network=network, label=label)


def _on_loopback(paths: list[Path]) -> None:
    """By torchrun, as on a real machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    torchrun = [sys.executable, "-m", *launcher, "-m", "thinwire"]
    with progress("training", len(paths)) as advance:
        for path in paths:
            done = subprocess.run([*torchrun, "train", str(path)], capture_output=True, text=True, timeout=600)
            if done.returncode != 0:
                raise UsageError(f"the run of {path} failed:\n{done.stderr[-2000:]}")
            advance(path.stem, 1)


def _show_sites(runs: Sequence[Run]) -> None:
    """Print what crossed the link between the sites: of per-step runs, gradients and the tied embedding."""
    between = [run.sent["site"] or run.sent["gradient"] + run.sent["embedding"] for run in runs]
    seconds = [run.seconds or 0.0 for run in runs]
    rows = [
        (
            run.name,
            f"{time:.1f} s",
            show_bytes(sent),
            f"{time / len(run.steps):.3f} s",
            show_bytes(sent / len(run.steps)),
        )
        for run, sent, time in zip(runs, between, seconds)
    ]
    columns = ("run", "time", "between sites", "per step", "between sites, per step")
    caption = "Of max all gradients and the tied embedding, of which some messages stay inside a site."
    table("Over the link between the sites", columns, rows, caption)


def _show_simulated(runs: Sequence[Run], link: HostLink) -> None:
    """Print the step times that the simulator, which knows no loss, predicts for the same runs on such links."""
    from thinwire.report.timeline import simulated

    steps = [simulated(run, link.up, link.latency).makespan for run in runs]
    rows = [(run.name, f"{step:.3f} s", f"{steps[0] / step:.1f}×") for run, step in zip(runs, steps)]
    table(f"Simulated, on links of {_words(replace(link, loss=0.0))}", ("wire", "per step", "speed-up"), rows)
