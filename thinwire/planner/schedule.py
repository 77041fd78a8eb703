"""Pipeline schedules, generated: what every rank computes and in which order.

P ranks, M micro-batches, V stages per rank. Stage s is on rank s mod P (loop) or, in the V shapes, on rank
min(s, 2P−1−s). Sources: GPipe (arXiv 1811.06965), 1F1B and its interleaved form (2104.04473), zero bubble and
ZB-V (2401.10241), DualPipe (2412.19437). The lists equal those that torch.distributed.pipelining runs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from thinwire.errors import UsageError
from thinwire.planner.actions import Action, Kind, Schedule

Slot = tuple[int, int]  # stage, micro-batch


class _Rank:
    """A rank's list in the making. Every call adds that stage's next micro-batch of that kind, up to M."""

    def __init__(self, microbatches: int) -> None:
        self._end = microbatches
        self.actions: list[Action] = []
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._pending: deque[Action] = deque()  # weight backwards put off, oldest first

    def take(self, kind: Kind, stage: int) -> Action:
        key = (Kind.I if kind is Kind.B else kind, stage)
        self._next[key] += 1
        return Action(stage, kind, self._next[key] - 1)

    def add(self, kind: Kind, stage: int) -> None:
        action = self.take(kind, stage)
        if action.microbatch is not None and action.microbatch < self._end:
            self.actions.append(action)
            if kind is Kind.I:
                self._pending.append(action._replace(kind=Kind.W))

    def forward(self, stage: int) -> None:
        self.add(Kind.F, stage)

    def backward(self, stage: int) -> None:
        self.add(Kind.B, stage)

    def backward_input(self, stage: int) -> None:
        self.add(Kind.I, stage)

    def backward_weight(self) -> None:
        """The oldest weight backward that is still pending; nothing if none is."""
        if self._pending:
            self.actions.append(self._pending.popleft())

    def backward_weights(self, stage: int, count: int | None = None) -> None:
        """The stage's oldest `count` (None: all) weight backwards that are still pending."""
        due = [a for a in self._pending if a.stage == stage][:count]
        self.actions.extend(due)
        done = set(due)
        self._pending = deque(a for a in self._pending if a not in done)

    def overlapped(self, forward: int, backward: int) -> None:
        parts = (self.take(Kind.F, forward), self.take(Kind.B, backward))
        self.actions.append(Action(-1, Kind.OVERLAP, None, parts))


def _gpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    return [Action(rank, kind, i) for kind in (Kind.F, Kind.B) for i in range(m)]


def _pairs(forwards: Sequence[Slot], backwards: Sequence[Slot], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    out = [Action(s, Kind.F, i) for s, i in forwards[:warmup]]
    for at, (stage, i) in enumerate(backwards):
        if at + warmup < len(forwards):
            ahead, j = forwards[at + warmup]
            out.append(Action(ahead, Kind.F, j))
        out.append(Action(stage, Kind.B, i))
    return out


def _one_f_one_b(p: int, m: int, v: int, rank: int, ahead: int = 1) -> list[Action]:
    """With ahead · (P−1−r) forwards before the first pair."""
    slots = [(rank, i) for i in range(m)]
    return _pairs(slots, slots, min(m, ahead * (p - 1 - rank)))


def _doubled_warmup(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B with 2(P−1−r) forwards ahead: a hop each way is hidden, for twice the stored activations."""
    return _one_f_one_b(p, m, v, rank, 2)


def _rounds(p: int, m: int, v: int, rank: int) -> tuple[list[Slot], list[Slot], int]:
    """Forward and backward order over a rank's V stages, micro-batches taken in rounds of about P."""
    size = m // max(1, m // p)
    starts = range(0, m, size)
    forwards = [(c * p + rank, i) for b in starts for c in range(v) for i in range(b, b + size)]
    backwards = [(c * p + rank, i) for b in starts for c in reversed(range(v)) for i in range(b, b + size)]
    return forwards, backwards, (v - 1) * size


def _interleaved(p: int, m: int, v: int, rank: int) -> list[Action]:
    forwards, backwards, ahead = _rounds(p, m, v, rank)
    return _pairs(forwards, backwards, min(m * v, ahead + 2 * (p - 1 - rank)))


def _interleaved_zero_bubble(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB1P: warm-up as short as 1F1B's; weight backwards trail by `rank` and fill the bubble at the end."""
    forwards, backwards, ahead = _rounds(p, m, v, rank)
    out: list[Action] = []
    pending: deque[Action] = deque()
    behind = 0
    for action in _pairs(forwards, backwards, min(m * v, ahead + p - 1 - rank)):
        if action.kind is Kind.F:
            out.append(action)
            continue
        out.append(action._replace(kind=Kind.I))
        pending.append(action._replace(kind=Kind.W))
        if behind >= rank:
            out.append(pending.popleft())
        behind += 1
    return out + list(pending)


def _zero_bubble_v(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-V: down the V on stage `down`, up on stage `up`; 1F1B on both, weight backwards last.

    M below 2P−1 gives the list for 2P−1 with the others left out: no phase then needs more than M turns.
    """
    down = rank
    up = 2 * p - 1 - rank
    todo = max(2 * p - 1, m)
    out = _Rank(m)

    def whole_backward(stage: int) -> None:
        out.backward_input(stage)
        out.backward_weights(stage, 1)

    for _ in range(min(2 * (p - rank) - 1, m)):
        out.forward(down)
    for _ in range(min(rank, m)):
        out.forward(up)
        out.forward(down)
    for _ in range(min(p - rank, m)):
        out.forward(up)
        whole_backward(up)
    ahead = 2 * p - rank - 1  # forwards done on `down`; `up` has done p
    for turn in range(min(todo - p, m)):
        if ahead + turn < todo:
            out.forward(down)
        whole_backward(down)
        out.forward(up)
        whole_backward(up)
    for _ in range(min(rank, m)):
        out.backward_input(down)
        out.backward_input(up)
    for _ in range(min(p - rank, m)):
        out.backward_input(down)
        out.backward_weights(down, 1)
    out.backward_weights(up)
    out.backward_weights(down)
    return out.actions


def _dual_pipe_v(p: int, m: int, v: int, rank: int) -> list[Action]:
    """DualPipeV: in the middle a forward on one arm of the V is overlapped with a backward on the other."""
    down = rank
    up = 2 * p - 1 - rank
    out = _Rank(m)
    for _ in range(2 * (p - rank - 1)):
        out.forward(down)
    for _ in range(rank + 1):
        out.forward(down)
        out.forward(up)
    for _ in range(p - rank - 1):
        out.backward_input(up)
        out.backward_weight()
        out.forward(up)
    for turn in range(m - 2 * p + rank + 1):
        if turn == 0 and rank == p - 1:  # here overlapping would only delay the first backward
            out.forward(down)
            out.backward(up)
        else:
            out.overlapped(down, up)
        out.overlapped(up, down)
    for _ in range(p - rank - 1):
        out.backward(up)
        out.overlapped(up, down)
    _dual_pipe_v_end(out, down, up, p, rank)
    return out.actions


def _dual_pipe_v_end(out: _Rank, down: int, up: int, p: int, rank: int) -> None:
    """Both arms drain; the second half of the backwards are split, and their weights fill the last gaps."""
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        (out.backward_input if turn > rank else out.backward)(stage)
    for _ in range(p - rank - 1):
        out.backward_weight()
        out.backward_input(down)
    for _ in range(rank + 1):
        out.backward_weight()


@dataclass(frozen=True)
class Recipe:
    """A schedule by name: its generator, and what it allows."""

    generate: Callable[[int, int, int, int], list[Action]]  # P, M, V, rank
    virtual: int | None = 1  # stages per rank; None: any
    v_shaped: bool = False
    even_rounds: bool = False  # M must split into M // P equal rounds
    full: bool = False  # M must be at least the number of stages
    in_torch: bool = True  # torch.distributed.pipelining has it, under the same name


SCHEDULES = {
    "GPipe": Recipe(_gpipe),
    "1F1B": Recipe(_one_f_one_b),
    "1F1B-doubled": Recipe(_doubled_warmup, in_torch=False),
    "Interleaved1F1B": Recipe(_interleaved, virtual=None, even_rounds=True),
    "InterleavedZeroBubble": Recipe(_interleaved_zero_bubble, virtual=None, even_rounds=True),
    "ZBVZeroBubble": Recipe(_zero_bubble_v, virtual=2, v_shaped=True),
    "DualPipeV": Recipe(_dual_pipe_v, virtual=2, v_shaped=True, full=True),
}
ALIASES = {"zbv": "ZBVZeroBubble"}
TORCH_SCHEDULES = tuple(name for name, recipe in SCHEDULES.items() if recipe.in_torch)
SINGLE_STAGE = tuple(name for name in TORCH_SCHEDULES if SCHEDULES[name].virtual == 1)  # one stage per rank


def schedule_title(name: str) -> str | None:
    """The schedule's own spelling of `name` (any case, or an alias); None if there is no such schedule."""
    known = {title.lower(): title for title in SCHEDULES} | ALIASES
    return known.get(name.lower())


def torch_schedule(name: str) -> str | None:
    """As `schedule_title`, among those that torch can run."""
    title = schedule_title(name)
    return title if title in TORCH_SCHEDULES else None


def generate(name: str, ranks: int, microbatches: int, virtual: int | None = None) -> Schedule:
    """The named schedule (any case) for P ranks and M micro-batches, with `virtual` stages per rank where the schedule
    allows a choice."""
    title = schedule_title(name)
    if title is None:
        raise UsageError(f'schedule {name!r}: allowed are {", ".join(SCHEDULES)}, or csv = "FILE"')
    recipe = SCHEDULES[title]
    v = _check(title, recipe, ranks, microbatches, virtual)
    rows = tuple(tuple(recipe.generate(ranks, microbatches, v, r)) for r in range(ranks))
    return Schedule(title, rows, tuple(_placed(ranks, v, recipe.v_shaped)), microbatches)


def generate_ahead(ranks: int, microbatches: int, ahead: int) -> Schedule:
    """1F1B in which rank r begins ahead · (P−1−r) micro-batches before its first pair; 1 is 1F1B itself."""
    plain = generate("1F1B", ranks, microbatches)
    return replace(plain, ranks=tuple(tuple(_one_f_one_b(ranks, microbatches, 1, r, ahead)) for r in range(ranks)))


def _placed(ranks: int, virtual: int, v_shaped: bool) -> Iterator[int]:
    for stage in range(ranks * virtual):
        yield min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


def _check(title: str, recipe: Recipe, ranks: int, microbatches: int, virtual: int | None) -> int:
    if ranks < 1 or microbatches < 1:
        raise UsageError(f"schedule {title}: {ranks} ranks, {microbatches} micro-batches; both must be at least 1")
    v = (recipe.virtual or 2) if virtual is None else virtual
    if v < 1 or (recipe.virtual is not None and v != recipe.virtual):
        raise UsageError(f"virtual = {v}: {title} has {recipe.virtual or '1 or more'} stage(s) per rank")
    rounds = max(1, microbatches // ranks)
    if recipe.even_rounds and microbatches % rounds:
        raise UsageError(f"microbatches = {microbatches}: {title}, {ranks} ranks, needs a multiple of {rounds}")
    if recipe.full and microbatches < ranks * v:
        raise UsageError(f"microbatches = {microbatches}: {title} needs at least one per stage, {ranks * v}")
    return v
