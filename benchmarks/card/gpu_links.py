"""What a pipeline's step takes on links that are shared fairly: the model beside section `pipeline` of gpu.py.

    python3 benchmarks/card/gpu_links.py

Four stages under 1F1B with more in flight (`overlap.run_ahead`), computing on one card that does CARD stages' work at a
time at most. A frame is on its way from when it is computed; it takes its sender's uplink and its receiver's downlink,
and all frames under way share the links max-min fairly, as TCP's flows do. Printed: the step over max(unshaped,
payload/rate), for each depth. The planner's model has no downlinks, and a port sends one message after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES, MICROBATCHES, BACKWARD = 4, 32, 2.0  # a backward takes so many forwards
LAST = 1.22  # the last stage has the head
CARD = 1.6  # stages' work at a time; measured: 1.9 s of kernels in a step of 1.1
FRAME, ON_LINK = 640_500.0, 1.065  # payload bytes; headers and acknowledgements come on top
UNSHAPED = 1.1
RATES, DEPTHS = (500, 300, 250, 125, 100, 75, 25), (1, 2, 3, 4, 6)
Task = tuple[str, int]  # "F" or "B", micro-batch
Flow = tuple[int, str]  # sending stage, direction


def order(stage: int, depth: int) -> list[Task]:
    ahead = min(MICROBATCHES, depth * (STAGES - 1 - stage) + 1)
    out: list[Task] = [("F", m) for m in range(ahead)]
    for m in range(MICROBATCHES):
        out += [("B", m)] + [("F", ahead + m)] * (ahead + m < MICROBATCHES)
    return out


def shares(flows: list[Flow]) -> dict[Flow, float]:
    """Max-min fair rates, of links of capacity 1: the most crowded link is shared equally, then the next."""
    links = {flow: (("up", flow[0]), ("down", receiver(flow))) for flow in flows}
    left = {link: 1.0 for pair in links.values() for link in pair}
    rates: dict[Flow, float] = {}
    while len(rates) < len(flows):
        waiting = [flow for flow in flows if flow not in rates]
        each = {link: sum(link in links[flow] for flow in waiting) for link in left}
        share, link = min((left[link] / count, link) for link, count in each.items() if count)
        for flow in (flow for flow in waiting if link in links[flow]):
            rates[flow] = share
            for used in links[flow]:
                left[used] -= share
    return rates


def receiver(flow: Flow) -> int:
    return flow[0] + 1 if flow[1] == "F" else flow[0] - 1


@dataclass
class Stage:
    tasks: list[Task]
    there: set[Task]  # whose input has arrived
    left: float | None = None  # of the task being computed


def step(forward: float, transfer: float, depth: int) -> float:
    """Seconds, for stages of `forward` seconds alone on the card and frames of `transfer` seconds alone on a link."""
    stages = [Stage(order(s, depth), set()) for s in range(STAGES)]
    stages[0].there = {("F", m) for m in range(MICROBATCHES)}
    queues: dict[Flow, list[tuple[int, float]]] = {(s, way): [] for s in range(STAGES) for way in "FB"}
    now = 0.0
    while any(stage.tasks for stage in stages):
        for s, stage in enumerate(stages):
            if stage.left is None and stage.tasks and stage.tasks[0] in stage.there:
                stage.left = forward * (BACKWARD if stage.tasks[0][0] == "B" else 1) * (LAST if s == STAGES - 1 else 1)
        computing = [stage for stage in stages if stage.left is not None]
        speed = min(1.0, CARD / max(1, len(computing)))
        rates = shares([flow for flow, queue in queues.items() if queue])
        ends = [(stage.left or 0.0) / speed for stage in computing]
        passed = min(ends + [queues[flow][0][1] / rate for flow, rate in rates.items()])
        now += passed
        for flow, rate in rates.items():
            part, size = queues[flow][0]
            queues[flow][0] = part, size - passed * rate
            if size - passed * rate <= 1e-12:
                queues[flow].pop(0)
                stages[receiver(flow)].there.add((flow[1], part))
        for s, stage in enumerate(stages):
            if stage.left is None:
                continue
            stage.left -= passed * speed
            if stage.left <= 1e-12:
                (way, part), stage.left = stage.tasks.pop(0), None
                if way == "F" and s == STAGES - 1:
                    stage.there.add(("B", part))
                elif 0 <= receiver((s, way)) < STAGES:
                    queues[s, way].append((part, transfer))
    return now


def forward_seconds() -> float:
    """The forward that makes an unshaped step last UNSHAPED."""
    low, high = 1e-4, 0.1
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if step(middle, 1e-9, 2) > UNSHAPED else (middle, high)
    return low


def main() -> None:
    forward, frames = forward_seconds(), 2 * MICROBATCHES
    print("Mbit/s " + "".join(f"{f'depth {depth}':>9}" for depth in DEPTHS))
    for rate in RATES:
        payload = FRAME * 8 / (rate * 1e6)
        bound = max(UNSHAPED, frames * payload)
        print(f"{rate:6} " + "".join(f"{step(forward, payload * ON_LINK, depth) / bound:9.3f}" for depth in DEPTHS))


if __name__ == "__main__":
    main()
