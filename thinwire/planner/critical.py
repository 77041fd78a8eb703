"""Which messages are worth compressing: those the step waits for.

A message with slack may be slower without delaying the end of the step; one without slack delays it. So: simulate with
nothing compressed, compress the messages without slack, and simulate again (others have become critical), until every
message that still has no slack is compressed already or would not get faster. While ports serve in the same order, the
step then ends no later than with everything compressed and codecs of equal cost: the critical path has compressed
messages only. The sets name messages by (traffic, stage, micro-batch), so both peers evaluate them to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from thinwire.config.stages import SLACK, Stages, chosen_stages
from thinwire.planner.simulate import Result, simulate
from thinwire.planner.step import Hop, Send, Step, Traffic

Predicate = Callable[[Send], bool]


@dataclass(frozen=True)
class Choice:
    """The messages to compress, the (virtual) stages whose gradients to compress, and the simulated step with these."""

    sends: frozenset[Send]
    gradients: frozenset[int]
    result: Result


def choose(plain: Step, packed: Step) -> Choice:
    """The set from slack; the best round is kept.

    plain, packed: the same step with nothing compressed and with everything that may be."""
    picked: set[Send] = set()
    latest = best = _outcome(plain, packed, picked)
    while fresh := _worth(latest.result, packed, picked):
        picked |= fresh
        latest = _outcome(plain, packed, picked)
        if latest.result.makespan < best.result.makespan:
            best = latest
    return best


def choose_by(plain: Step, packed: Step, when: Mapping[Traffic, str], stages: Stages) -> Choice:
    """The set by the rules of a wire: `when` by kind of message, `stages` of gradients. Slack decides where a rule is
    "critical" or "slack", and nowhere else."""
    last = epilogue(packed)
    listed = frozenset[int]() if stages == SLACK else chosen_stages(stages, packed.schedule.stages)

    def fixed(send: Send) -> bool:
        if send.traffic is Traffic.GRADIENT:
            return send.stage in listed
        rule = when.get(send.traffic, "always")
        return rule == "always" or (rule == "epilogue" and last(send))

    def allowed(send: Send) -> bool:
        left = stages == SLACK if send.traffic is Traffic.GRADIENT else when.get(send.traffic) == "critical"
        return left or fixed(send)

    return choose(mixed(plain, packed, fixed), mixed(plain, packed, allowed))


def _outcome(plain: Step, packed: Step, picked: set[Send]) -> Choice:
    chosen = frozenset(picked)
    result = simulate(mixed(plain, packed, chosen.__contains__))
    gradients = frozenset(s.stage for s in chosen if s.traffic is Traffic.GRADIENT)
    sends = frozenset(s for s in chosen if s.traffic in (Traffic.FORWARD, Traffic.BACKWARD))
    return Choice(sends, gradients, result)


def _worth(result: Result, packed: Step, picked: set[Send]) -> set[Send]:
    """Messages without slack that compression makes faster; a stage's gradients as a whole, by unit 0."""
    fresh = set()
    for message in result.messages.values():
        send = message.send
        if message.critical and send.traffic is Traffic.GRADIENT:
            now = sum(hop.seconds for hop in result.step.gradients[send.stage])
            then = sum(hop.seconds for hop in packed.gradients[send.stage])
            fresh |= {send._replace(part=0)} if then < now else set()
        elif message.critical and send.traffic is not Traffic.EMBEDDING:
            fresh |= {send} if packed.hop(send).seconds < message.hop.seconds else set()
    return fresh - picked


def mixed(plain: Step, packed: Step, compress: Predicate) -> Step:
    """The step in which exactly the messages that `compress` names are compressed (gradients: by unit 0)."""

    def hop(send: Send) -> Hop:
        return packed.hop(send) if compress(send) else plain.hop(send)

    units = [
        packed.gradients[stage] if compress(Send(Traffic.GRADIENT, stage, 0)) else hops
        for stage, hops in enumerate(plain.gradients)
    ]
    return replace(packed, hop=hop, gradients=units)


def epilogue(step: Step) -> Predicate:
    """Optimus-CC's set: backward sends of the last micro-batches, m ≥ M − (S − s); everything else passes."""
    spare = step.schedule.microbatches - step.schedule.stages
    return lambda send: send.traffic is not Traffic.BACKWARD or send.part >= spare + send.stage


def gradient_stages(dense: float, packed: float, drain: float, stages: int) -> frozenset[int]:
    """Closed form for 1F1B, where stage s ends s·(B+c) = s·`drain` before stage 0: compress the stages whose
    dense all-reduce outlasts stage 0's compressed one by more than that, dense > packed + s·drain."""
    return frozenset(s for s in range(stages) if dense > packed + s * drain)
