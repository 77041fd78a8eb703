"""A run on this machine: ranks on hosts of the lab, with links of the given rate, and its progress on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import RunFailed, UsageError
from thinwire.lab import DeadLink, Job, LabError, Network, RankFailed, check
from thinwire.lab.errors import describe as describe_status
from thinwire.lab.topology import Topology, flat, in_sites, make_link
from thinwire.quantities import parse_rate
from thinwire.terminal import progress
from thinwire.train.config.mesh import MeshConfig
from thinwire.train.config.sections import TrainConfig
from thinwire.train.metrics import METRICS, Event, EventReader, read_events
from thinwire.train.show import describe
from thinwire.train.stop import StopRequest

PRELOAD = ("torch", "torch.distributed.checkpoint", "transformers", "thinwire.train.rank")
WATCH = 0.5  # seconds between two readings of the metrics
FAILED = 1  # a rank's exit status where the run cannot go on
MISTAKE = 2  # its exit status after a mistake of the user
PREFIX = "thinwire: "  # before a rank's error line, as before the command's


def train_local(
    config: TrainConfig, *, rate: str | None = None, latency: str = "0ms", loss: str = "0%", resume: bool = False,
    timeout: float | None = None, network: Network | None = None, label: str = "train",
    stop: StopRequest | None = None,
) -> list[Event]:  # fmt: skip
    """Train on hosts of the lab, the ranks of a tensor-parallel group on one host; returns the events of the run.

    rate, latency, loss: of every host's link, such as "100mbit", "10ms" and "0.1%"; latency is one way, rate None
    unlimited. With several sites they are of every site's link to the others; inside a site links are unlimited.
    resume: go on from the newest checkpoint.
    timeout: seconds that the run may take; None: no limit.
    network: a network that is open already, whose rate is `rate`; None: one is made for this run.
    label: what stands before the progress.
    stop: where a stop is requested, the ranks write a checkpoint after their step, and there is no event "end".
    """
    if not check()[0].ok:
        raise UsageError("this machine forbids network namespaces (thinwire doctor says more): use torchrun instead")
    try:
        if network is not None:
            return _watched(network, config, resume, timeout, label, parse_rate(rate), stop)
        with Network(topology=topology(config.mesh, rate, latency, loss), preload=PRELOAD) as net:
            return _watched(net, config, resume, timeout, label, parse_rate(rate), stop)
    except RankFailed:
        raise
    except LabError as error:  # the lab itself has failed
        raise RunFailed(f"{error}; go on with --resume") from error


def topology(mesh: MeshConfig, rate: str | None, latency: str | float, loss: str | float) -> Topology:
    """The hosts of a run, one per tensor-parallel group, and their links; with several sites the links between them."""
    link = make_link({"latency": latency, "loss": loss} | ({} if rate is None else {"rate": rate}), "")
    hosts = mesh.site_ranks // mesh.tp
    return flat(hosts, link) if mesh.sites == 1 else in_sites(mesh.sites, hosts, link)


def _train(config: TrainConfig, resume: bool, rate: float | None) -> int:
    """In the rank: an error is printed in one line, and the exit status gives its kind."""
    from thinwire.train.rank import train_rank

    try:
        return train_rank(config, resume, rate=rate, show=False)
    except (UsageError, RunFailed) as error:
        print(f"{PREFIX}{error}", file=sys.stderr)
        raise SystemExit(MISTAKE if isinstance(error, UsageError) else FAILED) from None


def _watched(
    net: Network, config: TrainConfig, resume: bool, timeout: float | None, label: str, rate: float | None,
    stop: StopRequest | None,
) -> list[Event]:  # fmt: skip
    """Start the ranks and follow the metrics they write."""
    path = Path(config.run.out) / METRICS
    if not resume and path.exists():
        path.unlink()
    before, reader = read_events(path), EventReader(path)
    job = net.start(_train, config, resume, rate, per_host=config.mesh.tp, echo=False)
    asked = False
    while not job.watch(WATCH) and begun(reader.poll(), before) is None:
        _check_time(job, timeout)
        asked = asked or _pass_on(stop, job)
    total, done = begun(reader.poll(), before) or (1, 0)
    shown = 0
    with progress(label, total, done) as advance:
        running = True
        while running:
            running = not job.watch(WATCH)
            new = added(reader.poll(), before)
            for event in new[shown:]:
                if event["kind"] == "note":
                    print(event["text"], file=sys.stderr, flush=True)
                elif event["kind"] in ("step", "eval"):
                    advance(describe(event), int(event["kind"] == "step"))
            shown = len(new)
            _check_time(job, timeout)
            asked = asked or (running and _pass_on(stop, job))
    _check_end(job, asked)
    return read_events(path)


def begun(events: Sequence[Event], before: Sequence[Event]) -> tuple[int, int] | None:
    """(steps in all, steps done before) of a run that has written its first event; None until then.

    events: its own so far. before: those that were there when it was started, of the run that it resumes."""
    steps = next((event["steps"] for event in events if event["kind"] == "run"), None)
    new = added(events, before)
    if steps is None or not new:
        return None
    return steps, new[0]["step"] - int(new[0]["kind"] == "step")


def added(events: Sequence[Event], before: Sequence[Event]) -> Sequence[Event]:
    """`events` without those of `before` that a resumed run has kept.

    It keeps the first ones, up to its checkpoint, and does the steps after it again: those differ in their times."""
    pairs = zip(events, before)
    kept = next((at for at, (now, then) in enumerate(pairs) if now != then), min(len(events), len(before)))
    return events[kept:]


def _pass_on(stop: StopRequest | None, job: Job) -> bool:
    """Send the ranks a request to stop, where there is one."""
    if stop is None or not stop.asked:
        return False
    for place in job.placements:
        job.ask_to_end(place.rank)
    return True


def _check_end(job: Job, asked: bool) -> None:
    """What went wrong, in one line where it was a mistake; ranks that were asked to stop before they could do so with a
    checkpoint have been interrupted."""
    try:
        job.results()
    except RankFailed as failed:
        if asked:
            raise KeyboardInterrupt from None
        lines = [line for place in job.placements for line in job.output(place.rank)]
        errors = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
        if failed.status == MISTAKE and errors:
            raise UsageError(errors[-1]) from None
        if errors:
            raise RunFailed(f"{errors[0]}; go on with --resume") from None
        if failed.status < 0:  # killed, and the others were stopped before they had noticed
            said = f"rank {failed.rank} on {failed.host} {describe_status(failed.status)}"
            raise RunFailed(f"{said}; go on with --resume") from None
        raise
    except DeadLink as dead:  # the ranks went on waiting, and were stopped
        if asked:
            raise KeyboardInterrupt from None
        ranks = [str(place.rank) for place in job.placements if place.host == dead.host]
        raise RunFailed(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} on {dead.host}: a link to another host is "
            "dead: TCP had no answer and gave a connection up; go on with --resume"
        ) from None


def _check_time(job: Job, timeout: float | None) -> None:
    if timeout is not None and job.seconds > timeout:
        job.stop()
        raise UsageError(f"the run took longer than {timeout:.0f} s and was stopped")
