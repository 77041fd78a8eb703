"""A member as processes, one per rank: where it meets the others, and several members on hosts of the lab."""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.elastic.lighthouse import Lighthouse
from thinwire.elastic.require import require_torchft
from thinwire.errors import RunFailed, UsageError
from thinwire.lab import Job, Network, check
from thinwire.lab.events import Script
from thinwire.lab.topology import flat, make_link
from thinwire.terminal import progress
from thinwire.train.build import Checked
from thinwire.train.build import check as check_run
from thinwire.train.checkpoint import refuse_second_run
from thinwire.train.config.sections import TrainConfig
from thinwire.train.members.checks import alone
from thinwire.train.members.merged import Merged
from thinwire.train.members.trainer import MemberTrainer
from thinwire.train.metrics import METRICS, Event, read_events
from thinwire.train.rank import is_broken_connection
from thinwire.train.rank import join as join_group
from thinwire.train.show import closing, describe
from thinwire.train.stop import StopRequest

PORT = 29510  # of the lighthouse, where the command starts it
WATCH = 0.2  # seconds between two readings of the members' metrics
PRELOAD = ("torch", "torch.distributed.checkpoint", "transformers", "torchft", "thinwire.train.members.launch")
ENDED = "members-ended"  # a file that ends the lighthouse of a run in the lab
LOST_SECONDS = 2.0
LATE = 15.0
INSIDE = 29410  # the port at which ranks of a member meet in the lab
PATIENCE = timedelta(seconds=60)  # that ranks of a member wait for each other


def join(config: TrainConfig, lighthouse: str | None, host: str, name: str, resume: bool, show: bool = True) -> int:
    """Be one member, or as torchrun's variables say one rank of one, to the end of the run.

    lighthouse: None: one is started here, at `host`, by the member's first rank; others come to it."""
    require_torchft()
    rank = int(os.environ.get("RANK", 0)) if config.mesh.pp > 1 else 0
    begun = Lighthouse(host, PORT, lost_seconds=LOST_SECONDS) if lighthouse is None and rank == 0 else nullcontext()
    with begun as started:
        address = lighthouse or ("" if started is None else started.address)  # the first rank's alone is asked for
        if started is not None:
            _say(f"members meet at {address}: others join with --lighthouse {address}")
        try:
            _train(config, address, host, name or f"{socket.gethostname()}-{os.getpid()}", resume, show)
        except OSError as error:
            raise RunFailed(f"{error.filename or config.run.out}: {error.strerror or error}") from error
    return 0


def _train(config: TrainConfig, lighthouse: str, host: str, name: str, resume: bool, show: bool) -> None:
    checked = check_run(alone(config))
    if config.mesh.pp > 1:
        join_group("gloo", PATIENCE)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=PATIENCE)
    try:
        _fit(config, checked, lighthouse, host, name, resume, show)
    except RunFailed:
        raise
    except RuntimeError as error:
        if not is_broken_connection(error):
            raise
        reason = re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0]).partition(". This is ")[0]  # Gloo's
        raise RunFailed(f"this member has lost one of its ranks, and ends: {reason}") from error
    dist.destroy_process_group()


def _fit(
    config: TrainConfig, checked: Checked, lighthouse: str, host: str, name: str, resume: bool, show: bool
) -> None:  # fmt: skip
    show = show and dist.get_rank() == 0
    trainer = MemberTrainer(
        config, checked, lighthouse, host, name, resume=resume, say=_say if show else lambda _: None,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
    )  # fmt: skip
    if not show:
        trainer.fit()
    else:
        with progress("train", trainer.steps, trainer.step) as advance:

            def on_event(event: dict[str, Any]) -> None:
                if event["kind"] in ("step", "eval"):
                    advance(describe(event), int(event["kind"] == "step"))

            trainer.on_event = on_event
            trainer.fit()
        if trainer.step == trainer.steps:
            _say(closing(config.run.out, read_events(trainer.out / METRICS)))


# --- on this machine


def join_locally(
    config: TrainConfig, members: int, *, rate: str | None, latency: str, loss: str, resume: bool, script: Script,
    stop: StopRequest, timeout: float | None,
) -> list[Event]:  # fmt: skip
    """Members on hosts of the lab, from host1 on, each with all its ranks on one; the lighthouse is on host0. The
    events of the run, of all members.

    Every member's own folder is `[run] out`/<its host>. script: what happens to hosts meanwhile. stop: where it is
    requested, members write a checkpoint after their step.
    """
    if not check()[0].ok:
        raise UsageError("this machine forbids network namespaces (thinwire doctor says more): start members by hand")
    require_torchft()
    out = Path(config.run.out)
    (out / ENDED).unlink(missing_ok=True)
    for place in out.glob("host*"):
        refuse_second_run(place, resume)
    link = make_link({"latency": latency, "loss": loss} | ({} if rate is None else {"rate": rate}), "")
    with (
        Network(topology=flat(members + 1, link), preload=PRELOAD, patience=60, end_dead=False) as net,
        Merged(out, [host.name for host in net.hosts[1:]], resume) as merged,
    ):
        addresses = [str(host.address) for host in net.hosts]
        per_host = config.mesh.pp
        absent = script.absent([host.name for host in net.hosts for _ in range(per_host)])
        job = net.start(_on_host, config, addresses, per_host=per_host, absent=absent, echo=False, separate=True)
        failed = _watch(net, job, merged, script, stop, out / ENDED, timeout)
        (out / ENDED).unlink(missing_ok=True)
        if failed and not merged.ended:
            raise RunFailed(f"no member has come to the end of the run; the last one: {failed}")
    return read_events(out / METRICS)


def _watch(
    net: Network, job: Job, merged: Merged, script: Script, stop: StopRequest, ended: Path, timeout: float | None
) -> str:
    """Until all members have ended, or are dead and none of them will be added; then the lighthouse is ended too. What
    the last one said that ended with an error; "" where none did, or another one ended well: they go on without it.

    Whoever came so late that the others are through is ended LATE seconds after them: nobody would train with it."""
    asked, through, failed = False, math.inf, dict[int, str]()
    members = [place.rank for place in job.placements if place.host_number > 0]
    while not job.watch(WATCH):
        merged.follow(_say)
        if merged.ended:
            through = min(through, job.seconds)
            script.events.clear()
        script.tick(net, job, _say)
        for rank in members:
            if (job.statuses[rank] or 0) <= 0:
                failed.pop(rank, None)
            elif rank not in failed:
                failed[rank] = f"{job.placements[rank].label}: {''.join(job.output(rank)[-1:]) or 'nothing was said'}"
                _say(failed[rank])
        if job.seconds > through + LATE:
            for rank in members:
                job.lose(rank)
        gone = all(job.statuses[rank] is not None for rank in members)
        if gone and (merged.ended or asked or not script.events):
            ended.touch()
        if stop.asked and not asked:
            asked = True
            for rank in members:
                job.ask_to_end(rank)
        if timeout is not None and job.seconds > timeout:
            job.stop()
            raise RunFailed(f"the run was not through after {timeout:g} s, and was stopped")
    merged.follow(_say)
    left = any(job.statuses[rank] == 0 for rank in members)  # when asked to, with a checkpoint
    return "" if left else ["", *failed.values()][-1]


def _on_host(config: TrainConfig, addresses: list[str]) -> int:
    """On host0 the lighthouse, on any other a rank of a member; one that was killed and comes again goes on from what
    it has, or from the others' state."""
    number, rank, name = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"]), socket.gethostname()
    out = Path(config.run.out)
    require_torchft()
    if number == 0:
        if rank > 0:
            return 0
        with Lighthouse(addresses[0], PORT, min_members=config.run.min_replicas, lost_seconds=LOST_SECONDS):
            while not (out / ENDED).exists():
                time.sleep(WATCH)
        return 0
    own = replace(config, run=replace(config.run, out=str(out / name)))
    world = {"RANK": rank, "WORLD_SIZE": config.mesh.pp, "MASTER_ADDR": addresses[number], "MASTER_PORT": INSIDE}
    os.environ |= {key: str(value) for key, value in world.items()}
    try:
        return join(own, f"http://{addresses[0]}:{PORT}", addresses[number], name, resume=True, show=False)
    except (UsageError, RunFailed) as error:
        print(f"thinwire: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
