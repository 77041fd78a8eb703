"""`thinwire demo`: a training run in a few minutes on one machine, first as torch sends it, then compressed.

Four ranks (two replicas of a pipeline of two stages) fine-tune a small Llama-class model on some source of Python's own
library, over emulated links of --rate on this machine (`thinwire lab`). The model is pre-trained first, for half a
minute on other source, without a slow network. The same run is then done twice: with nothing compressed, and with the
preset `max`. At the end a table is printed and a page with figures is written.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import UsageError
from thinwire.installed import check_figures, check_training
from thinwire.quantities import parse_rate, show_rate
from thinwire.terminal import progress, table, write_json

if TYPE_CHECKING:
    from thinwire.report.runs import Run

RUNS = ("off", "max")
TOML = """\
# Written by `thinwire demo`; try it yourself: thinwire train {name}.toml --local 4 --rate {rate} --out out/mine
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
    parser.add_argument("--steps", type=int, default=42, help="of each run (default 42)")
    parser.add_argument("--out", default="out/demo", help="folder of runs and page (default out/demo)")
    parser.add_argument("--json", metavar="PATH", help="write the table there")


def run(args: argparse.Namespace) -> int:
    """Pre-train, train uncompressed and compressed, print the table and write the report; the exit status."""
    rate = parse_rate(args.rate)
    if args.steps < 12:
        raise UsageError(f"--steps {args.steps}: at least 12 are needed to see anything")
    from thinwire.lab import check

    check_training()
    check_figures("the report at its end")
    finding = check()[0]
    folder = Path(args.out)
    _clear(folder)
    paths = _write_configs(folder, args.rate, args.steps)
    if finding.ok:
        print(f"Fine-tuning on links of {show_rate(rate)}, {args.steps} steps each: uncompressed, then compressed.")
        _in_the_lab(paths, args.rate)
    else:
        print(f"This machine forbids network namespaces: {finding.detail}. {finding.remedy}")
        print("So both runs are on loopback, as fast as it is; what a slow network would do is simulated below.")
        _on_loopback(paths)
    from thinwire.report.command import report
    from thinwire.report.runs import read_runs

    runs = read_runs([folder / name for name in RUNS])
    document = report(runs, folder / "report.html")
    if not finding.ok:
        _show_simulated(runs, rate)
    write_json(args.json, {"rate": rate, "shaped": finding.ok, **document})
    print(f"Look at {folder / 'report.html'}; the runs are in {folder}, with their configuration to change.")
    return 0


def _clear(folder: Path) -> None:
    """Make the folder empty; only what an earlier demo made is removed."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "pretrain.toml").exists():
        raise UsageError(f"--out {folder}: holds files that are not a demo's; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot make that folder: {error.strerror}") from None


def _write_configs(folder: Path, rate: str, steps: int) -> list[Path]:
    """Write pretrain.toml and one configuration per run into the folder; their paths."""
    common = {"rate": rate, "every": max(1, steps // 8)}
    first = {"name": "pretrain", "wire": "off", "model": NEW, "corpus": 1_000_000, "samples": 0, "steps": PRETRAIN,
             "lr": 3e-3, **common, "every": PRETRAIN}  # fmt: skip
    tuned = {"model": 'path = "pretrain/model"', "corpus": 2_000_000, "samples": 226, "steps": steps, "lr": 5e-4}
    tables = [first, *({"name": name, "wire": name, **tuned, **common} for name in RUNS)]
    paths = []
    for values in tables:
        paths.append(folder / f"{values['name']}.toml")
        paths[-1].write_text(TOML.format(**values, out=folder / str(values["name"])))
    return paths


def _in_the_lab(paths: list[Path], rate: str) -> None:
    from thinwire.lab import Network
    from thinwire.train.config.sections import load
    from thinwire.train.folder_lock import locked
    from thinwire.train.local import PRELOAD, train_local
    from thinwire.train.rank import record

    with Network(hosts=4, preload=PRELOAD) as network:
        for path in paths:
            config = load(path)
            slow = rate if path.stem in RUNS else "unlimited"
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


def _show_simulated(runs: Sequence[Run], rate: float | None) -> None:
    """Print the step times that the simulator predicts for the same runs on links of this rate (bit/s)."""
    from thinwire.report.timeline import simulated

    steps = [simulated(run, rate).makespan for run in runs]
    rows = [(run.name, f"{step:.3f} s", f"{steps[0] / step:.1f}×") for run, step in zip(runs, steps)]
    table(f"Simulated, on links of {show_rate(rate)}", ("wire", "per step", "speed-up"), rows)
