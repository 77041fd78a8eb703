"""`thinwire train`: one command for one machine, for several, and for an emulated slow network.

thinwire train --init run.toml                    write a commented configuration
thinwire train run.toml                           one rank, or under torchrun on any number of machines
thinwire train run.toml --local 4 --rate 100mbit  four ranks here, on links of 100 Mbit/s (`thinwire lab`)

With [mesh] sites = 2 and a table [local] a run has two sites, which train by themselves and average seldom. Then
--rate, --latency and --loss are of the links between sites, and the ranks of a site have fast ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.config.presets import PRESETS, written_out
from thinwire.errors import UsageError
from thinwire.installed import check_training
from thinwire.train.config.mesh import MeshConfig
from thinwire.train.config.sections import TrainConfig, init_text, load
from thinwire.train.folder_lock import locked
from thinwire.train.loggers.events import check_loggers
from thinwire.train.members.checks import check_elastic
from thinwire.train.model.gguf import as_folder, is_gguf

INTERRUPTED = 130  # the exit status of what Ctrl-C ended


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `thinwire train` on its parser."""
    parser.description = __doc__
    parser.add_argument("config", metavar="run.toml", nargs="?", help="the run; see --init")
    parser.add_argument("--init", metavar="PATH", help="write a commented configuration there, and stop")
    parser.add_argument(
        "--local", type=int, metavar="N", help="start N ranks on this machine, each (tp of them) on a host of the lab"
    )
    parser.add_argument(
        "--rate", help="of every host's link, or every site's to the others, with --local: 100mbit (default: unshaped)"
    )
    parser.add_argument("--latency", default="0ms", help="one way between hosts, or sites, with --local (default 0ms)")
    parser.add_argument(
        "--loss", default="0%", help="packets lost on their way, with --local, such as 0.1%% (default 0%%)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint in [run] out")
    parser.add_argument("--out", help="instead of [run] out")
    parser.add_argument("--wire", metavar="PRESET", help=f"instead of [wire]: auto, {', '.join(PRESETS)}")
    parser.add_argument("--watch", action="store_true", help="serve a page that follows the run (thinwire watch)")
    parser.add_argument("--timeout", type=float, default=None, help="seconds a local run may take (default: no limit)")
    parser.add_argument("--elastic", action="store_true", help="be a member of a run that others join and leave")
    parser.add_argument("--lighthouse", metavar="URL", help="where its members meet; default: one is started here")
    parser.add_argument("--host", default="127.0.0.1", help="this member's address (default 127.0.0.1)")
    parser.add_argument("--name", default="", help="this member's name (default: host and process)")
    parser.add_argument("--events", metavar="FILE", help="with --elastic --local: what happens to hosts (docs/lab.md)")


def watched(args: argparse.Namespace) -> list[Path]:
    """The folder of the run that `args` name, on the process that writes its metrics; none elsewhere."""
    if args.init or args.config is None or int(os.environ.get("RANK", 0)):
        return []
    return [Path(args.out or load(args.config).run.out)]


def run(args: argparse.Namespace) -> int:
    """Write a configuration, train on this machine's lab, or train as one rank; the exit status."""
    if args.init:
        return _init(Path(args.init))
    if args.config is None:
        raise UsageError("which run? thinwire train run.toml, or --init run.toml for a configuration to start from")
    config = _config(args)
    if config.run.elastic:
        check_elastic(config)
        return _elastic(config, args)
    for name in ("lighthouse", "events"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for runs whose members come and go: give --elastic too")
    if args.local is not None:
        _check_ranks(config.mesh, args.local, f"give --local {config.mesh.ranks}, or another [mesh] in {args.config}")
        return _local(config, args)
    for name, unused in (("rate", None), ("latency", "0ms"), ("loss", "0%"), ("timeout", None)):
        if getattr(args, name) != unused:
            raise UsageError(f"--{name} is for ranks on hosts of the lab: give --local {config.mesh.ranks} too")
    return _rank(config, args)


def _config(args: argparse.Namespace) -> TrainConfig:
    config = load(args.config)
    written_out(config.wire)  # a preset or a section that does not exist
    check_training(config.model.lora is not None)
    check_loggers(config.run.loggers)
    if args.out:
        config = replace(config, run=replace(config.run, out=args.out))
    if args.wire:
        if args.wire not in ("auto", *PRESETS):
            raise UsageError(f"--wire {args.wire}: allowed are auto, {', '.join(PRESETS)}")
        config = replace(config, wire={"preset": args.wire})
    if args.elastic:
        config = replace(config, run=replace(config.run, elastic=True))
    if config.local:
        from thinwire.config.local import Local  # it imports torch, whose optimisers average the anchors

        Local.read(config.local)
    path = config.model.path
    if path is not None and is_gguf(path):
        folder = as_folder(path, config.run.out, lambda line: print(line, file=sys.stderr, flush=True))
        config = replace(config, model=replace(config.model, path=folder))
    return config


def _check_ranks(mesh: MeshConfig, started: int, remedy: str) -> None:
    """Before torch is imported and any group is made."""
    if mesh.ranks != started:
        raise UsageError(
            f"[mesh] {mesh.describe()}: takes {mesh.ranks} ranks, but {started} "
            f"{'was' if started == 1 else 'were'} started: {remedy}"
        )


def _local(config: TrainConfig, args: argparse.Namespace) -> int:
    with locked(config.run.out):
        return _train_local(config, args)


def _train_local(config: TrainConfig, args: argparse.Namespace) -> int:
    from thinwire.train.local import train_local
    from thinwire.train.rank import record
    from thinwire.train.show import closing
    from thinwire.train.stop import StopRequest

    record(config, args.config, args.resume)
    print(_started(config, args.rate or "unlimited"), flush=True)
    with StopRequest(True, config.mesh.sites) as stop:
        events = train_local(
            config,
            rate=args.rate,
            latency=args.latency,
            loss=args.loss,
            resume=args.resume,
            timeout=args.timeout,
            stop=stop,
        )
    return _ended(events, closing(config.run.out, events))


def _ended(events: Sequence[dict[str, Any]], said: str) -> int:
    """A run on this machine, with what it says at its end; or it was interrupted. The exit status."""
    if not any(event["kind"] == "end" for event in events):
        done = max((event["step"] for event in events), default=0)
        print(f"stopped at step {done}, with a checkpoint: go on with --resume")
        return INTERRUPTED
    print(said)
    return 0


def _started(config: TrainConfig, rate: str) -> str:
    """The first line of a run on this machine."""
    sites = config.mesh.sites
    wire = config.wire.get("preset", "as in run.toml") if config.wire else "off"
    ranks = f"{config.mesh.ranks} ranks on this machine"
    if sites == 1:
        return f"{ranks}, links {rate}, wire {wire}"
    local = config.local.get("preset", "as in run.toml")
    return f"{ranks} in {sites} sites, wire {wire} inside a site, between sites links {rate} and local steps {local}"


def _elastic(config: TrainConfig, args: argparse.Namespace) -> int:
    """This process is a member, or with --local starts several on hosts of the lab."""
    from thinwire.lab.events import Script, load_events
    from thinwire.train.members.launch import join, join_locally
    from thinwire.train.rank import record
    from thinwire.train.show import closing
    from thinwire.train.stop import StopRequest

    lighthouse = args.lighthouse or config.run.lighthouse
    if args.local is None:
        size, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
        own = replace(config.mesh, dp=1)
        _check_ranks(own, size, f"torchrun --nproc-per-node {own.ranks} -m thinwire train … --elastic")
        resume = args.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        with locked(config.run.out) if rank == 0 else nullcontext():
            if rank == 0:
                record(config, args.config, resume)
            return join(config, lighthouse, args.host, args.name, resume)
    with locked(config.run.out):
        record(config, args.config, args.resume)
        hosts = [f"host{number}" for number in range(args.local + 1)]
        script = Script([]) if args.events is None else load_events(args.events, hosts, config.run.out)
        with StopRequest(True) as stop:
            events = join_locally(
                config, args.local, rate=args.rate, latency=args.latency, loss=args.loss, resume=args.resume,
                script=script, stop=stop, timeout=args.timeout,
            )  # fmt: skip
    return _ended(events, closing(config.run.out, events, "host1/model"))


def _init(path: Path) -> int:
    if path.exists():
        raise UsageError(f"{path} exists already")
    try:
        path.write_text(init_text())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    ranks = load(path).mesh.ranks
    print(f"wrote {path}: edit it, then thinwire train {path} --local {ranks} --rate 100mbit, or under torchrun")
    return 0


def _rank(config: TrainConfig, args: argparse.Namespace) -> int:
    """This process is one rank: torchrun's, or the only one."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    _check_ranks(
        config.mesh,
        size,
        f"torchrun --nproc-per-node {config.mesh.ranks} -m thinwire train …, or --local {config.mesh.ranks}",
    )
    from thinwire.train.rank import record, train_rank

    resume = args.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0  # torchrun --max-restarts
    alone = "WORLD_SIZE" not in os.environ
    local = int(os.environ.get("LOCAL_RANK", 0))
    with locked(config.run.out) if rank == 0 else nullcontext():
        if rank == 0:
            record(config, args.config, resume)
        return train_rank(config, resume, local_rank=local, alone=alone)
