"""`thinwire demo`: a training run in a few minutes on one machine, first as torch sends it, then compressed.

Four ranks (two replicas of a pipeline of two stages) fine-tune a small Llama-class model on some source of Python's own
library, over emulated links of --rate, --latency and --loss on this machine (`thinwire lab`). The model is pre-trained
first, for half a minute on other source, without a slow network. The same run is then done twice: with nothing
compressed, and with the preset `max`. At the end a table is printed and a page with figures is written.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import UsageError
from thinwire.installed import check_figures, check_training
from thinwire.lab.topology import HostLink, make_link
from thinwire.quantities import show_rate
from thinwire.terminal import progress, table, write_json

if TYPE_CHECKING:
    from thinwire.report.runs import Run

RUNS = ("off", "max")
TOML = """\
# Written by `thinwire demo`; try it yourself: thinwire train {name}.toml --local 4 {links} --out out/mine
[model]
{model}
[data]
seq_len = 128
tokenizer = "bytes"
corpus_bytes = {corpus}
samples = {samples}
held_out = 0.15
[mesh]
dp = 2
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
"""
NEW = "hidden = 128\nlayers = 4\nheads = 4"
PRETRAIN = 150  # steps of the pre-training


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `thinwire demo` on its parser."""
    parser.description = __doc__
    parser.add_argument("--rate", default="10mbit", help="of every host's link (default 10mbit)")
    parser.add_argument("--latency", default="0ms", help="one way between hosts, such as 40ms (default 0ms)")
    parser.add_argument("--loss", default="0%", help="packets lost on their way, such as 0.1%% (default 0%%)")
    parser.add_argument("--steps", type=int, default=42, help="of each run (default 42)")
    parser.add_argument("--out", default="out/demo", help="folder of runs and page (default out/demo)")
    parser.add_argument("--json", metavar="PATH", help="write the table there")
    parser.add_argument("--watch", action="store_true", help="serve a page that follows both runs (thinwire watch)")


def watched(args: argparse.Namespace) -> list[Path]:
    """The folders of the runs that are compared."""
    return [Path(args.out) / name for name in RUNS]


def run(args: argparse.Namespace) -> int:
    """Pre-train, train uncompressed and compressed, print the table and write the report; the exit status."""
    link = make_link({"rate": args.rate, "latency": args.latency, "loss": args.loss}, "")
    if args.steps < 12:
        raise UsageError(f"--steps {args.steps}: at least 12 are needed to see anything")
    from thinwire.lab import check

    check_training()
    check_figures("the report at its end")
    finding = check()[0]
    folder = Path(args.out)
    _clear(folder)
    paths = _write_configs(folder, args.rate, link, args.steps)
    if finding.ok:
        print(f"Fine-tuning on links of {_words(link)}, {args.steps} steps each: uncompressed, then compressed.")
        _in_the_lab(paths, args.rate, link)
    else:
        print(f"This machine forbids network namespaces: {finding.detail}. {finding.remedy}")
        print("So both runs are on loopback, as fast as it is; what a slow network would do is simulated below.")
        _on_loopback(paths)
    from thinwire.report.command import report
    from thinwire.report.runs import read_runs

    runs = read_runs([folder / name for name in RUNS])
    if finding.ok:  # the trainer records the rate; it does not know the others
        links = {"latency": link.latency, "loss": link.loss}
        runs = [replace(run, about={**run.about, **links}) for run in runs]
    document = report(runs, folder / "report.html")
    if not finding.ok:
        _show_simulated(runs, link)
    settings = {"rate": link.up, "latency": link.latency, "loss": link.loss, "shaped": finding.ok}
    write_json(args.json, settings | document)
    print(f"Look at {folder / 'report.html'}; the runs are in {folder}, with their configuration to change.")
    return 0


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


def _write_configs(folder: Path, rate: str, link: HostLink, steps: int) -> list[Path]:
    """Write pretrain.toml and one configuration per run into the folder; their paths."""
    late = f" --latency {1e3 * link.latency:g}ms" if link.latency else ""
    common = {"links": f"--rate {rate}{late}", "every": max(1, steps // 8)}
    first = {"name": "pretrain", "wire": "off", "model": NEW, "corpus": 1_000_000, "samples": 0, "steps": PRETRAIN,
             "lr": 3e-3, **common, "every": PRETRAIN}  # fmt: skip
    tuned = {"model": 'path = "pretrain/model"', "corpus": 2_000_000, "samples": 226, "steps": steps, "lr": 5e-4}
    tables = [first, *({"name": name, "wire": name, **tuned, **common} for name in RUNS)]
    paths = []
    for values in tables:
        paths.append(folder / f"{values['name']}.toml")
        paths[-1].write_text(TOML.format(**values, out=folder / str(values["name"])))
    return paths


def _in_the_lab(paths: list[Path], rate: str, link: HostLink) -> None:
    """Train by every configuration: on links of that rate, latency and loss, but the pre-training on fast ones."""
    from thinwire.lab import Network
    from thinwire.train.config.sections import load
    from thinwire.train.folder_lock import locked
    from thinwire.train.local import PRELOAD, train_local
    from thinwire.train.rank import record

    with ExitStack() as stack:
        near = far = stack.enter_context(Network(hosts=4, preload=PRELOAD))
        if link.delayed:
            far = stack.enter_context(Network(hosts=4, latency=link.latency, loss=link.loss, preload=PRELOAD))
        for path in paths:
            config = load(path)
            slow, network = (rate, far) if path.stem in RUNS else ("unlimited", near)
            for host in range(4):
                network.set_rate(host, slow)
            label = f"wire {path.stem}" if path.stem in RUNS else "pre-training"
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


def _show_simulated(runs: Sequence[Run], link: HostLink) -> None:
    """Print the step times that the simulator, which knows no loss, predicts for the same runs on such links."""
    from thinwire.report.timeline import simulated

    steps = [simulated(run, link.up, link.latency).makespan for run in runs]
    rows = [(run.name, f"{step:.3f} s", f"{steps[0] / step:.1f}×") for run, step in zip(runs, steps)]
    table(f"Simulated, on links of {_words(replace(link, loss=0.0))}", ("wire", "per step", "speed-up"), rows)
