"""What ranks measured of a step, as numbers, and the simulator's step that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from thinwire.planner.actions import Schedule
from thinwire.planner.flows import INITIAL, MSS, SILENCE, slow_start
from thinwire.planner.simulate import Result, simulate
from thinwire.planner.step import Hop, Machine, Send, Step, Traffic, Work

NO_LIMIT = 1e15  # bits per second: no network is so fast, and JSON has no infinity
REPLICAS = 4  # connections that wait for each other, about: the unluckiest counts
PASSES = 2  # simulations after which silences hardly change any more
Silences = Mapping[tuple[str, int], float]  # in seconds, by kind of traffic and stage


@dataclass(frozen=True)
class Measured:
    """What the slowest rank measured, as numbers that JSON can store. Kinds that do not occur have no key."""

    forward: list[float]  # seconds of a micro-batch, by stage
    backward: list[float]
    rate: dict[str, list[float]]  # bits per second, by direction and sending stage; 0 where no link is crossed
    latency: dict[str, list[float]]  # seconds, likewise
    size: dict[str, list[float]]  # bytes, by kind and level
    coding: dict[str, list[list[float]]]  # seconds to encode and to decode a message, by direction and level
    exchange: dict[str, list[list[float]]]  # seconds, by kind and level: of gradients by stage, of the embedding one
    waiting: dict[str, list[list[float]]] = field(default_factory=dict)  # of these seconds, those without a transfer
    closing: float = 0.0  # seconds of the vote and the optimiser's step
    streams: int = 1
    machine: list[int] = field(default_factory=lambda: [0, 0, 1])  # cores, ranks and replicas that share them; 0: none
    burst: dict[str, list[list[float]]] = field(default_factory=dict)  # bytes per connection, as `exchange`
    slowest: list[float] = field(default_factory=lambda: [NO_LIMIT, 0.0])  # rate and latency between replicas
    restarts: bool = True  # a connection that was silent starts slowly again
    # Seconds by stage, of forward and of backward, by the number of micro-batches: where it is left open.
    by_microbatches: dict[str, list[list[float]]] = field(default_factory=dict)
    loss: float = 0.0  # share of packets that were lost, where it slows TCP down
    usual: float = 0.0  # bytes that one connection then has under way on average

    def with_microbatches(self, count: int, usual: int) -> Measured:
        """As if a pass had so many micro-batches, instead of as many as `usual`, with which messages were measured."""
        if count == usual:
            return self
        forward, backward = self.by_microbatches[str(count)]
        share = usual / count
        size = {kind: [share * n if kind in self.rate else n for n in sizes] for kind, sizes in self.size.items()}
        coding = {way: [[share * t for t in times] for times in levels] for way, levels in self.coding.items()}
        return replace(self, forward=forward, backward=backward, size=size, coding=coding)

    def with_loss(self, loss: float, usual: float) -> Measured:
        """Where packets are lost: what was timed is between TCP's first windows and those that it comes down to. So
        links have the best rate that was seen, and TCP's windows say the rest. loss, usual: as of the fields."""
        best = max([self.slowest[0], *(rate for rates in self.rate.values() for rate in rates)])
        rate = {way: [best if rate else 0.0 for rate in rates] for way, rates in self.rate.items()}
        exchange = {
            kind: [
                [waits + min(all_of_it - waits, 8 * nbytes / best) for all_of_it, waits, nbytes in zip(*of_level)]
                for of_level in zip(levels, self.waiting[kind], self.burst[kind])
            ]
            for kind, levels in self.exchange.items()
        }
        slowest = [best, self.slowest[1]]
        return replace(self, rate=rate, exchange=exchange, slowest=slowest, loss=loss, usual=usual)

    def step(self, schedule: Schedule, levels: Mapping[str, int], fused: bool = False) -> Step:
        """The simulator's step at these levels. `fused`: the tied embedding in one exchange.

        How long a connection was silent before a step follows from the step itself: it is simulated, and made anew.
        """
        step = self._step(schedule, levels, fused, {})
        for _ in range(PASSES if self.restarts and self._is_long() else 0):
            step = self._step(schedule, levels, fused, _silences(simulate(step)))
        return step

    def _step(self, schedule: Schedule, levels: Mapping[str, int], fused: bool, silences: Silences) -> Step:
        """silences: in seconds, by connection; SILENCE where one is not known."""
        halves = tuple(t / 2 for t in self.backward)
        hops = {
            Send(Traffic(way), stage, part): self._hop(way, stage, levels[way], part, schedule.microbatches, silences)
            for way, rates in self.rate.items()
            for stage, rate in enumerate(rates)
            for part in range(schedule.microbatches)
            if rate
        }
        gradients = self.exchange.get("gradient")
        embedding = self.exchange.get("embedding")
        return Step(
            schedule, Work(tuple(self.forward), halves, halves), hops.__getitem__,
            self._exchange("gradient", levels["gradient"], silences) if gradients else [],
            self._exchange("embedding", levels["embedding"], silences)[0][0] if embedding else None,
            fused, Machine(*self.machine), max((hop.wire for hop in hops.values()), default=0.0), closing=self.closing,
        )  # fmt: skip

    def _is_long(self) -> bool:
        """Does any connection take more than a first window of bytes to fill?"""
        links = [(r, x) for way in self.rate for r, x in zip(self.rate[way], self.latency[way]) if r]
        return any(rate < NO_LIMIT and rate * 2 * latency / 8 > INITIAL for rate, latency in [*links, self.slowest])

    def cost(self, kind: str, level: int) -> float:
        """Seconds of all that kind's messages, or exchanges, one after another."""
        if kind in self.rate:
            return sum(self._hop(kind, stage, level).seconds for stage, rate in enumerate(self.rate[kind]) if rate)
        return sum(self.exchange[kind][level]) if kind in self.exchange else 0.0

    def _exchange(self, kind: str, level: int, silences: Silences) -> list[list[Hop]]:
        seconds = self.exchange[kind][level]
        waiting = self.waiting[kind][level] if kind in self.waiting else [0.0] * len(seconds)
        bursts = self.burst[kind][level] if kind in self.burst else [0.0] * len(seconds)
        rate, latency = self.slowest
        hops = []
        for stage, (all_of_it, idle, nbytes) in enumerate(zip(seconds, waiting, bursts)):
            slower = self._slower(nbytes, rate, latency, silences.get((kind, stage), SILENCE))
            hops.append([Hop(wire=all_of_it - idle, latency=idle + slower)])
        return hops

    def _hop(
        self, way: str, stage: int, level: int, part: int = 0, count: int = 1, silences: Silences = MappingProxyType({})
    ) -> Hop:  # fmt: skip
        """Of a message, the one with number `part` of `count` in a step: the first of them find a connection that has
        been silent."""
        nbytes, (encode, decode) = self.size[way][level], self.coding[way][level]
        rate, latency = self.rate[way][stage], self.latency[way][stage]
        silence = silences.get((way, stage), SILENCE)
        before = self._slower(part * nbytes, rate, latency, silence, count * nbytes)
        after = self._slower((part + 1) * nbytes, rate, latency, silence, count * nbytes)
        return Hop(nbytes, 8 * nbytes / rate + after - before, latency, encode, decode)

    def _slower(self, nbytes: float, rate: float, latency: float, silence: float, burst: float | None = None) -> float:
        """Seconds that slow start adds to the first bytes after a silence (planner/flows.py)."""
        if not self.restarts or rate >= NO_LIMIT:
            return 0.0
        if not self.loss:
            return slow_start(nbytes, rate, 2 * latency, self.streams, silence, burst)
        again = 1 - (1 - self.loss) ** (REPLICAS * nbytes / MSS)  # a packet that is sent again comes a round trip later
        slower = slow_start(nbytes, rate, 2 * latency, self.streams, silence, burst, self.usual)
        return slower + again * 2 * latency


def _silences(result: Result) -> Silences:
    """By connection how long nothing is sent on it, from a step's last message to the next step's first."""
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for send, message in result.messages.items():
        first, last = spans.get((send.traffic, send.stage), (message.start, message.start))
        spans[send.traffic, send.stage] = min(first, message.start), max(last, message.start + message.hop.wire)
    return {key: result.makespan - (last - first) for key, (first, last) in spans.items()}
