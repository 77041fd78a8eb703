"""`thinwire plan plan.toml --rate 100mbit`: what messages cost, which of them the step waits for, how long it takes."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from thinwire.config.presets import LOCAL_PRESETS, PRESETS
from thinwire.errors import UsageError
from thinwire.installed import check_figures
from thinwire.planner import predict as predictions
from thinwire.planner import rounds
from thinwire.planner.config import Run, load
from thinwire.planner.settings import Wire, preset
from thinwire.planner.simulate import Message, Result
from thinwire.planner.step import Traffic
from thinwire.quantities import parse_rate, parse_time, show_bytes, show_rate
from thinwire.terminal import progress, table, write_json

POINTS_PER_DECADE = 6
ROUNDING = 1e-9  # seconds; a smaller difference of two times is a rounding error


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `thinwire plan` on its parser."""
    parser._negative_number_matcher = re.compile(r"-\d.*")  # so that --rate -5mbit reaches our own message
    parser.add_argument(
        "config", nargs="?", metavar="PLAN", help="a plan file (--init writes one), or the folder of a run: out/train"
    )
    parser.add_argument("--init", metavar="PATH", help="write a commented example and stop")
    parser.add_argument("--rate", help="of the slow network, per port: 100mbit, 1gbit, unlimited")
    parser.add_argument("--latency", help="of the slow network, one way: 10ms")
    parser.add_argument("--sweep", metavar="rate=LOW..HIGH", help="step time against rate: rate=1mbit..10gbit")
    parser.add_argument(
        "--local-steps", action="store_true", help="also sites that average seldom: bytes and seconds per token"
    )
    parser.add_argument("--figure", metavar="PATH", default="out/plan/sweep.png", help="where --sweep draws")
    parser.add_argument("--timeline", metavar="PATH", help="draw the step: compute, wire and codec of every rank")
    parser.add_argument("--trace", metavar="PATH", help="the step as Chrome-trace JSON")
    parser.add_argument("--actions", action="store_true", help="print the action list of every rank")
    parser.add_argument("--all", action="store_true", help="one line per message instead of one per boundary")
    parser.add_argument("--json", metavar="PATH", help="write everything that is printed, and every message")


def run(args: argparse.Namespace) -> int:
    """Write an example, or simulate the plan and print what its messages and steps cost; the exit status."""
    if args.init:
        return _init(Path(args.init))
    if not args.config:
        raise UsageError("no plan given: thinwire plan PLAN.toml, or thinwire plan --init PLAN.toml for an example")
    if args.sweep or args.timeline:
        check_figures("a picture")
    plan = _load(args.config, args.rate, args.latency)
    rates = _range(args.sweep) if args.sweep else []
    if args.actions:
        print(plan.schedule.text())
    wire = plan.wire or preset("off")
    result = predictions.predict(plan, wire)
    slices = f" × tp {plan.tp}" if plan.tp > 1 else ""
    title = f"{plan.schedule.name}, dp {plan.dp} × pp {plan.pp}{slices}, {show_rate(plan.network.across.rate)}"
    _show_messages(result, f"{title}: messages with {wire.name}", every=args.all)
    wires = [preset(name) for name in PRESETS] + ([wire] if wire.name not in PRESETS else [])
    steps = _steps(plan, wires)
    _show_steps(steps, f"{title}: predicted step times")
    document: dict[str, Any] = {"title": title, "messages": _records(result), "steps": steps}
    document["worth_compressing"] = _worth(plan, plan.wire or preset("safe"))
    if args.local_steps:
        document["local_steps"] = _show_rounds(plan, steps, title)
    if rates:
        document["sweep"] = _sweep(plan, wires, rates, args.figure, title, args.local_steps)
    _write_pictures(result, f"{title}, {wire.name}", args)
    write_json(args.json, document)
    return 0


def _load(place: str, rate: str | None, latency: str | None) -> Run:
    """A plan file, or the folder of a run of `thinwire train`, whose measured computing times are used."""
    if not Path(place).is_dir():
        return load(place, rate, latency)
    from thinwire.report.runs import read_run
    from thinwire.report.timeline import fitted

    plan = fitted(read_run(Path(place)), elsewhere=rate is not None)
    across = plan.network.across
    link_rate = across.rate if rate is None else parse_rate(rate, "--rate")
    return plan.at(link_rate, None if latency is None else parse_time(latency, "--latency"))


def _init(path: Path) -> int:
    if path.exists():
        raise UsageError(f"{path} is there already; --init writes a new file only")
    try:
        path.write_text((Path(__file__).parent / "planner" / "example.toml").read_text())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}; next: thinwire plan {path} --rate 100mbit")
    return 0


def _range(text: str) -> list[float]:
    """Rates from "rate=1mbit..10gbit", evenly spaced on a logarithmic axis."""
    match = re.fullmatch(r"rate=(.+)\.\.(.+)", text)
    if match is None:
        raise UsageError(f"--sweep {text!r}: write rate=LOW..HIGH, such as rate=1mbit..10gbit")
    low, high = (parse_rate(end, "--sweep rate") for end in match.groups())
    if low is None or high is None or low >= high:
        raise UsageError(f"--sweep {text!r}: the first rate must be limited and lower than the second")
    steps = max(4, round(POINTS_PER_DECADE * len(f"{high / low:.0f}")))
    return [low * (high / low) ** (i / steps) for i in range(steps + 1)]


def _records(result: Result) -> list[dict[str, Any]]:
    return [
        {"traffic": m.send.traffic, "stage": m.send.stage, "part": m.send.part, "bytes": m.hop.nbytes,
         "wire_s": m.hop.wire + m.hop.latency, "codec_s": m.hop.encode + m.hop.decode,
         "start_s": m.start, "slack_s": m.slack, "critical": m.critical}
        for m in result.messages.values()
    ]  # fmt: skip


def _show_messages(result: Result, title: str, every: bool) -> None:
    """One line per boundary (or stage), or with `every` one line per message."""
    groups: dict[tuple[Any, ...], list[Message]] = defaultdict(list)
    for send, message in result.messages.items():
        groups[(send.traffic, send.stage, *((send.part,) if every else ()))].append(message)
    rows = [_row(key, groups[key]) for key in sorted(groups, key=lambda k: (list(Traffic).index(k[0]), *k[1:]))]
    columns = ("message", "sent", "bytes each", "on the wire", "in codecs", "least slack", "critical")
    spent = ", ".join(f"{what} {seconds:.4g} s" for what, seconds in result.spent.items())
    caption = f"step {result.makespan:.4g} s; its critical path: {spent}; ranks idle {result.bubble:.1%}"
    table(title, columns, rows, caption)


def _row(key: tuple[Any, ...], messages: list[Message]) -> list[Any]:
    traffic, stage = key[:2]
    name = {
        Traffic.FORWARD: f"forward {stage} → {stage + 1}",
        Traffic.BACKWARD: f"backward {stage} → {stage - 1}",
        Traffic.GRADIENT: f"gradient of stage {stage}",
        Traffic.EMBEDDING: f"embedding, stage {stage}",
    }[traffic]
    part = f", {'unit' if traffic is Traffic.GRADIENT else 'micro-batch'} {key[2]}" if len(key) > 2 else ""
    sizes = sorted({m.hop.nbytes for m in messages})
    biggest = max(messages, key=lambda m: m.hop.nbytes).hop
    return [
        name + part, len(messages), " … ".join(show_bytes(b) for b in (sizes[:1] + sizes[1:][-1:])),
        _time(biggest.wire + biggest.latency), _time(biggest.encode + biggest.decode),
        _time(min(m.slack for m in messages)), f"{sum(m.critical for m in messages)} of {len(messages)}",
    ]  # fmt: skip


def _time(seconds: float) -> str:
    if seconds < ROUNDING:
        return "0 s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def _steps(plan: Run, wires: list[Wire]) -> list[dict[str, Any]]:
    steps = []
    with progress("plan", len(wires)) as advance:
        for wire in wires:
            result = predictions.predict(plan, wire)
            has_delta = any(s and s.delta for s in (wire.forward, wire.backward))
            cold = predictions.predict(plan, wire, cold=True).makespan if has_delta else None
            steps.append({
                "wire": wire.name, "step_s": result.makespan, "first_visit_s": cold,
                "sent": sum(result.sent.values()), "sent_by_kind": result.sent, "bubble": result.bubble,
                "wire_share": result.wire_share, "critical_path_s": result.spent,
            })  # fmt: skip
            advance(wire.name, 1)
    return steps


def _show_steps(steps: list[dict[str, Any]], title: str) -> None:
    seconds = {s["wire"]: s["step_s"] for s in steps}
    off = seconds["off"]
    bf16 = seconds["bf16"]
    columns = ("wire", "step s", "against off", "against bf16", "first visit s", "sent", "on the wire", "idle")
    rows = []
    for s in steps:
        gains = [f"{base / s['step_s']:.2f}×" for base in (off, bf16)]
        shares = [f"{s['wire_share']:.0%}", f"{s['bubble']:.0%}"]
        rows.append([s["wire"], s["step_s"], *gains, s["first_visit_s"], show_bytes(s["sent"]), *shares])
    notes = "sent: by one pipeline; first visit: deltas sent whole; on the wire: of the critical path"
    table(title, columns, rows, notes)


def _worth(plan: Run, wire: Wire) -> dict[str, Any]:
    """Print which messages have to be compressed for the step to be as short as this wire can make it."""
    choice, everything = predictions.worth(plan, wire)
    counts: dict[str, Any] = {}
    for traffic in (Traffic.FORWARD, Traffic.BACKWARD):
        picked = sorted((s.stage, s.part) for s in choice.sends if s.traffic is traffic)
        total = sum(s.traffic is traffic for s in choice.result.messages)
        counts[traffic.value] = {"picked": picked, "of": total}
    stages = sorted(choice.gradients)
    text = ", ".join(f"{kind} {len(c['picked'])} of {c['of']}" for kind, c in counts.items())
    print(
        f"Worth compressing with {wire.name}: {text}, gradients of stages {stages or 'none'}: "
        f"{choice.result.makespan:.4g} s per step, against {everything.makespan:.4g} s with all compressed."
    )
    return {
        **counts,
        "gradient_stages": stages,
        "step_s": choice.result.makespan,
        "all_s": everything.makespan,
    }


def _show_rounds(plan: Run, steps: list[dict[str, Any]], title: str) -> list[dict[str, Any]]:
    """Print the local presets, every replica a site, beside the per-step wires; their figures."""
    if plan.dp < 2:
        raise UsageError("--local-steps: needs two replicas or more, [mesh] dp = 2: each is a site")
    tokens = rounds.tokens_per_step(plan)
    off = next(s for s in steps if s["wire"] == "off")
    found = [rounds.rounds_of(plan, name) for name in LOCAL_PRESETS]
    records = [
        {"wire": s["wire"], "every": None, "bytes_per_token": s["sent"] / tokens, "s_per_token": s["step_s"] / tokens}
        for s in steps
    ] + [
        {"wire": r.name, "every": r.every, "bytes_per_token": r.cost.nbytes / r.every / tokens,
         "s_per_token": r.step_seconds(plan) / tokens, "round_s": r.round_seconds(plan),
         "computing": r.computing / r.step_seconds(plan), "every_for_95": r.every_for_share(plan),
         "every_as_fast": {s["wire"]: r.every_for(plan, s["step_s"]) for s in steps}}
        for r in found
    ]  # fmt: skip
    rows = [
        [r["wire"], r["every"], f"{r['bytes_per_token']:.4g}", f"{1e6 * r['s_per_token']:.4g}",
         f"{off['step_s'] / tokens / r['s_per_token']:.2f}×", r.get("every_for_95"),
         r["every_as_fast"].get("max") if "every_as_fast" in r else None]
        for r in records
    ]  # fmt: skip
    columns = (
        "wire",
        "every",
        "bytes per token",
        "µs per token",
        "against off",
        "every for 95 %",
        "every as fast as max",
    )
    notes = "local steps: a replica is a site, its pipeline inside; 95 %: of the time, for computing"
    table(f"{title}: {plan.dp} sites, local steps beside per-step wires", columns, rows, notes)
    return records


def _sweep(
    plan: Run, wires: list[Wire], rates: list[float], path: str, title: str, local_steps: bool
) -> dict[str, Any]:
    from thinwire.planner import figures

    curves = predictions.sweep(plan, wires, rates) + (rounds.curves(plan, rates) if local_steps else [])
    faster = [{base: str(found) for base, found in c.faster_than.items()} for c in curves]
    rows = [[c.wire, f.get("off"), f.get("bf16")] for c, f in zip(curves, faster)]
    table("Faster", ("wire", "than off", "than bf16"), rows, f"figure: {path}")
    figures.save(figures.sweep(curves, rates, title.rsplit(",", 1)[0] + ": step time against rate"), path)
    records = [{"wire": c.wire, "step_s": c.seconds, "faster_than": f} for c, f in zip(curves, faster)]
    return {"rates": rates, "curves": records}


def _write_pictures(result: Result, title: str, args: argparse.Namespace) -> None:
    if args.timeline:
        from thinwire.planner import figures

        figures.save(figures.timeline(result, f"{title}: {result.makespan:.4g} s per step"), args.timeline)
        print(f"timeline: {args.timeline}")
    if args.trace:
        from thinwire.planner import trace

        write_json(args.trace, trace.chrome_trace(result))
        print(f"trace: {args.trace}")
