"""A channel fitted to what it sends: books by water-filling, token means, known sizes, damage, checkpoints."""

from __future__ import annotations

import functools

import fitted_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_support import SCHEDULES
from rank_cases import Case, name_of, run_cases
from rank_launch import launch, on_a_network, passed

from thinwire.codecs import Quantize, Rotated, Transform
from thinwire.codecs.transform import ERROR, gain
from thinwire.codecs.transform_book import CLASSES, STEP, Book
from thinwire.codecs.transform_fit import Moments, fit
from thinwire.config.wire import Link, Wire
from thinwire.errors import UsageError
from thinwire.lab import Network
from thinwire.memory.scale_gradient import through_code
from thinwire.memory.token_means import TokenMeans, following
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message

PRELOAD = ("warm", "fitted_cases")
CASES: list[Case] = [
    *(functools.partial(cases.fitted_links_train, name) for name in SCHEDULES),
    cases.resumed_fitted_links_have_the_same_bits, cases.fitted_links_roll_back,
    cases.states_of_another_revision_are_refused, cases.means_of_gradients_follow_the_loss_scale,
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    with Network(hosts=2, preload=PRELOAD) as net:
        return launch(net, run_cases, CASES, timeout=100)


@pytest.mark.parametrize("case", [pytest.param(case, id=name_of(case)) for case in CASES])
@pytest.mark.timeout(120)
@on_a_network[0]
@on_a_network[1]
def test_case(ranks, case):
    passed(ranks, case)


class Boundary:
    """Two ends of a lane, and hidden states of few large directions, some of which a token has in common."""

    def __init__(self, link: Link, width: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.link, self.width, self.generator, self.steps = link, width, generator, 0
        basis = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        self.mix = (basis * torch.logspace(0, -2, width)).T
        self.tokens = torch.randn(9, width, generator=generator) / 4
        self.ends = [Lane(link, "forward 0→1", end, 0) for end in ("send", "recv")]

    def step(self, keep: bool = True, spoil: int | None = None) -> float:
        """The relative squared error of two micro-batches. spoil: a byte of the first frame to change, from its end."""
        wrong = whole = 0.0
        for lane in self.ends:
            lane.begin(self.steps)
        self.steps += 1
        for number in range(2):
            ids = torch.randint(9, (6, 20), generator=self.generator)
            x = torch.randn(6, 20, self.width, generator=self.generator) @ self.mix + self.tokens[ids]
            message = Message(number, None, True, tokens=ids)
            room = self.ends[1].expect(message, 0, x.shape, x)
            frame = self.ends[0].send(message, 0, x)
            assert frame.numel() == room.numel()
            if spoil is not None and number == 0:
                frame[-spoil] ^= 1
            y = self.ends[1].recv(message, 0, frame, x.shape, x.dtype)
            wrong, whole = wrong + float((y - x).square().sum()), whole + float(x.square().sum())
        for lane in self.ends:
            lane.resolve_checks()
            lane.end_step(keep and not self.ends[1].faults)
        return wrong / whole

    def error(self, steps: int) -> float:
        return [self.step() for _ in range(steps)][-1]


def test_what_is_fitted_errs_less_with_as_many_bits():
    """A rotation; token means; a learnt basis; both. The first two books come with steps 3 and 9."""
    codecs = {"rotated": (0, 0.0), "means": (0, 0.1), "basis": (100, 0.0), "both": (100, 0.1)}
    found = {name: Boundary(Link(Transform(2, every), tokens=rate)).error(12) for name, (every, rate) in codecs.items()}
    assert found["rotated"] == pytest.approx(0.119 / 0.881, abs=0.015)  # what arrives is not drawn to zero
    assert found["means"] < 0.75 * found["rotated"] and found["basis"] < 0.5 * found["rotated"]
    assert found["both"] < 0.7 * min(found["means"], found["basis"])


@pytest.mark.parametrize("codec", [Rotated(Quantize(4)), Transform(3, every=3)], ids=str)
def test_a_dropped_step_and_a_checkpoint_leave_no_trace(codec):
    """Against a boundary whose dropped step never was: the same tables, books, sizes, errors, from a checkpoint too."""
    ours, other = (Boundary(Link(codec, tokens=0.1)) for _ in range(2))
    for keep in (True, True, True, False, True, True, False):
        state = other.generator.get_state()
        ours.step(keep)
        if keep:
            other.step()
        else:  # the same data, numbers of steps and so seeds
            other.generator.set_state(ours.generator.get_state())
            other.steps += 1
        assert keep or not torch.equal(state, ours.generator.get_state())
    saved = [lane.state_dict(True) for lane in ours.ends]
    assert all(torch.equal(saved[i][n], v) for i in (0, 1) for n, v in other.ends[i].state_dict(True).items()
               if "fitted/" in n)  # fmt: skip
    again = Boundary(ours.link)
    again.steps = ours.steps
    again.generator.set_state(ours.generator.get_state())
    for lane, state in zip(again.ends, saved):
        lane.load_state_dict(state)
    assert [again.step() for _ in range(4)] == [ours.step() for _ in range(4)]
    sender, receiver = (lane.coded[0].means.table for lane in ours.ends)
    assert torch.equal(sender, receiver) and sender.any()


@pytest.mark.parametrize(
    "codec", [Transform(2, every=3), Transform(3, every=3, early_bits=6, early_steps=20), Quantize(4)], ids=str
)
def test_a_checkpoint_of_another_codec_goes_on_without_its_book(codec):
    """Until there is one of as many bits."""
    before, after = Boundary(Link(Transform(3, every=3), tokens=0.1)), Boundary(Link(codec, tokens=0.1))
    before.error(7)
    after.steps = before.steps
    for lane, old in zip(after.ends, before.ends):
        lane.load_state_dict(old.state_dict(True))
    assert after.ends[0].coded[0].means.table.any() and getattr(after.ends[0].coded[0].codec, "book", None) is None
    errors = [after.step() for _ in range(6)]
    assert not after.ends[1].faults and max(errors) < 0.1
    assert isinstance(codec, Quantize) or errors[-1] < 0.7 * errors[0]


@pytest.mark.parametrize("every", [0, 100])
def test_bits_of_the_first_steps_end_where_they_should(every):
    """Sizes fall with step 6 at both ends, and errors are those of a codec of so many bits; a dropped step counts for
    nothing, and a checkpoint from before goes on alike."""
    boundary = Boundary(Link(Transform(2, every, early_bits=6, early_steps=6)))
    fewer = Boundary(Link(Transform(2, every)))
    errors = [boundary.step() for _ in range(3)]
    boundary.step(keep=False)
    saved = [lane.state_dict(True) for lane in boundary.ends]
    again = Boundary(boundary.link)
    again.steps = boundary.steps
    again.generator.set_state(boundary.generator.get_state())
    for lane, state in zip(again.ends, saved):
        lane.load_state_dict(state)
    after = [boundary.step() for _ in range(6)]
    assert after == [again.step() for _ in range(6)]
    assert max(errors + after[:3]) < 0.01 < min(after[3:])
    assert [lane.coded[0].codec.bits for lane in boundary.ends] == [2, 2]
    assert after[-1] == pytest.approx(fewer.error(9), rel=0.1)


@pytest.mark.parametrize("byte", [3, 30_000])  # of the book, which is longer than the message before it; of the message
def test_a_damaged_frame_is_a_fault_at_the_receiver(byte):
    boundary = Boundary(Link(Transform(2, every=100)), width=64)
    for _ in range(2):
        boundary.step()
    size = Book.nbytes(64)
    boundary.step(spoil=byte if byte < size else size + 40)
    assert "damaged" in boundary.ends[1].faults[0]
    assert boundary.ends[1].coded[0].codec.book is None
    boundary.step()
    assert boundary.ends[1].coded[0].codec.book is not None and not boundary.ends[1].faults


@given(st.integers(2, 12), st.floats(0.3, 7.9), st.integers(0, 999))
def test_bits_go_where_they_save_most(width, bits, seed):
    """No bit of a component would save more at another; as many bits as asked for; the basis is the covariance's."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, width, generator=generator) * torch.logspace(0, -1.5, width)
    moments = Moments.of(x).plus(Moments.of(x.roll(1, 0)))
    codec = Transform(bits, every=1)
    book = fit(codec, moments)
    assert int(book.bits[0].sum()) == codec.row_bits(width) and book.basis is not None
    assert int(book.bits[1:].sum()) == CLASSES * codec.row_bits(width)
    covariance = moments.products / moments.count
    rotated = book.basis.T @ covariance @ book.basis
    assert float((rotated - rotated.diag().diag()).abs().max()) < 0.02 * float(rotated.diag().max())
    alike, energies = rotated.diag().clamp_min(1e-12)[None], moments.energies / moments.count
    for variances, taken in ((alike, book.bits[:1]), (energies[:, None] * alike, book.bits[1:])):
        saved = variances[..., None] * (torch.tensor(ERROR[:-1]) - torch.tensor(ERROR[1:]))
        saved, flat = saved.view(-1, 8), taken.flatten().tolist()
        last = [float(saved[i, b - 1]) for i, b in enumerate(flat) if b]
        following = [float(saved[i, b]) for i, b in enumerate(flat) if b < 8]
        assert not following or min(last) >= max(following) * (1 - 1e-4)
    again = Book.read(book.raw(), width)
    assert again is not None and torch.equal(again.basis, book.basis) and torch.equal(again.steps, book.steps)


@pytest.mark.parametrize("bits", range(1, 9))
def test_steps_are_the_best_equal_ones_for_a_normal_variable(bits):
    x = torch.randn(400, 500, generator=torch.Generator().manual_seed(0))
    codec = Transform(bits)
    drawn = codec.decode(codec.encode(x), x.shape, x.dtype) * (1 - ERROR[bits])  # to zero, as the least error has it
    error = float((drawn - x).square().mean())
    assert error == pytest.approx(ERROR[bits], rel=0.04)
    for factor in (0.9, 1.1):  # any other step errs more
        half = 2.0 ** (bits - 1)
        codes = torch.floor(x / (factor * STEP[bits])).clamp(-half, half - 1) + 0.5
        assert float((codes * factor * STEP[bits] - x).square().mean()) > error


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_what_arrives_is_not_drawn_to_zero(bits):
    """Over many messages of the same values, which are far from normal, the mean is the values. In a learnt basis that
    holds over normal values."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(8, 64, generator=generator) - 0.5) ** 3 * torch.logspace(0, -1, 64)
    codec = Transform(bits)
    mean = torch.stack([codec.decode(codec.encode(x, s), x.shape, x.dtype, s) for s in range(400)]).mean(0)
    assert float((mean * x).sum() / x.square().sum()) == pytest.approx(1, abs=0.05 if bits > 1 else 0.1)
    x = torch.randn(4000, 64, generator=generator) * torch.logspace(0, -1, 64)
    codec = Transform(bits, every=1)
    book = fit(codec, Moments.of(x))
    sent, x = book.bits[1:].amin(0) > 0, x @ book.basis
    y = codec.with_book(book).decode(codec.with_book(book).encode(x @ book.basis.T), x.shape, x.dtype) @ book.basis
    assert float((y * x)[:, sent].sum() / x[:, sent].square().sum()) == pytest.approx(1, abs=0.02)
    assert gain(torch.tensor([0, 1])).tolist() == pytest.approx([1, 1 / (1 - ERROR[1])])


def test_means_have_the_same_bits_whatever_the_threads():
    """Else the two ends of a boundary would drift apart."""
    generator = torch.Generator().manual_seed(0)
    tokens, rows = torch.randint(2000, (4096,), generator=generator), torch.randn(4096, 256, generator=generator)
    tables, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 2, 2, 3):
            torch.set_num_threads(number)
            means = TokenMeans(0.5)
            means.of(tokens, rows)
            means.note(tokens, rows)
            means.end_step(keep=True)
            tables.append(means.table)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(table, tables[0]) for table in tables) and tables[0].any()


def test_a_token_s_mean_is_that_of_its_first_visits_and_then_follows():
    means = TokenMeans(0.5)
    for value in (4.0, 2.0, 2.0, 0.0):
        ids, x = torch.tensor([[3, 3]]), torch.tensor([[[value - 1], [value + 1]]])
        means.note(ids, x - means.of(ids, x))
        means.end_step(keep=True)
    assert means.visits.tolist() == [0, 0, 0, 4] and float(means.table[3]) == pytest.approx(1.25)


@pytest.mark.parametrize("bits", [0.5, 1, 2.5, 3, 4])
@pytest.mark.parametrize("width", [48, 64, 192])
def test_nothing_is_drawn_to_zero(bits, width):
    """Rows with large values and of unlike blocks, which are clipped: along what was sent what arrives is as long, per
    row to half a step of its scale. 48: blocks reach over rows; 192: three of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, width, generator=generator) * torch.exp(torch.randn(1, width, generator=generator))
    x *= torch.exp(torch.randn(4000, width // 16, generator=generator)).repeat_interleave(16, 1)
    codec = Transform(bits)
    y = codec.decode(codec.encode(x, 5), x.shape, x.dtype, 5)
    along = (y * x).sum(1) / x.square().sum(1)
    assert float((y * x).sum() / x.square().sum()) == pytest.approx(1, abs=0.001)
    if width != 48:
        assert float((along - 1).abs().max()) < 0.003 and float(along.mean()) == pytest.approx(1, abs=1e-4)


@given(st.integers(1, 4), st.integers(0, 2**31))
def test_a_gradient_passes_through_the_scale(rows: int, seed: int):
    """Euler's identity of a code whose steps follow the scale: J·z = C(z), so z·Jᵀg = C(z)·g for every g, row by row;
    across z nothing changes."""
    generator = torch.Generator().manual_seed(seed)
    z, g = torch.randn(2, rows, 64, generator=generator)
    codec = Quantize(2, block=64)
    y = codec.decode(codec.encode(z), z.shape, z.dtype)
    through = through_code(g, z, y - z)
    assert torch.allclose((z * through).sum(-1), (y * g).sum(-1), atol=1e-3)
    across = torch.randn(rows, 64, generator=generator)
    across -= z * (across * z).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True)
    assert torch.allclose((across * through).sum(-1), (across * g).sum(-1), atol=1e-3)
    assert torch.equal(through_code(g, torch.zeros_like(z), torch.zeros_like(z)), g)


def test_a_sender_corrects_each_micro_batch_once():
    """With what it coded beside the token means; a message that was not sent, or is of the step before, is unknown."""
    lane = Lane(Link(Quantize(2), tokens=0.5, scale_gradient=True), "forward 0→1", "send", 0)
    ids, x, g = torch.zeros(1, 4, dtype=torch.int64), torch.randn(1, 4, 128), torch.randn(1, 4, 128)
    for step in range(2):
        lane.begin(step)
        for number in range(2):
            lane.send(Message(number, None, True, tokens=ids), 0, x)
        first = lane.correct(1, [g])[0]
        assert not torch.equal(first, g) and torch.equal(lane.correct(1, [g])[0], g)
        assert torch.equal(lane.correct(7, [g])[0], g)
        if step == 0:
            before = first
        lane.end_step(keep=True)
    lane.begin(2)
    assert not torch.allclose(first, before), "means are not what was coded"
    assert torch.equal(lane.correct(0, [g])[0], g), "the step before it is forgotten"


def test_gradients_have_means_of_the_tokens_that_come_next():
    ids = torch.tensor([[5, 0, 7]])
    told = {way: Message(0, None, True).told(ids, way).tokens.tolist() for way in ("forward", "backward")}
    assert told == {"forward": [[5, 0, 7]], "backward": [[1, 8, 0]]}
    link = Link(Transform(4), tokens=0.5)
    ends = [Lane(link, "backward 1→0", end, 0) for end in ("send", "recv")]
    generator, of_token = torch.Generator().manual_seed(0), torch.randn(9, 64)
    errors, scale = [], 1.0
    for step in range(7):
        for lane in ends:
            lane.begin(step)
            if step in (3, 4):
                lane.rescale(4.0)  # the loss scale has changed; the first of these steps is not kept
        scale = 4.0 if step >= 3 else 1.0
        ids = torch.randint(8, (4, 16), generator=generator)
        x = (of_token[following(ids)] + 0.01 * torch.randn(4, 16, 64, generator=generator)) * scale
        message = Message(0, None, True, tokens=following(ids))
        y = ends[1].recv(message, 0, ends[0].send(message, 0, x), x.shape, x.dtype)
        errors.append(float((y - x).square().sum() / x.square().sum()))
        for lane in ends:
            lane.resolve_checks()
            lane.end_step(keep=step != 3)
    means = [lane.coded[0].means.table for lane in ends]
    assert torch.equal(*means) and max(errors[1:]) < errors[0] / 20, errors


def test_what_cannot_be_is_said():
    for table, said in (
        ({"codec": "transform", "bits": 9}, "0.25 to 8"), ({"codec": "transform", "bits": 2, "every": -1}, "every"),
        ({"codec": "transform", "bits": 2, "book": 1}, "learnt"),
        ({"codec": "transform", "bits": 2, "early_bits": 9, "early_steps": 1}, "early_bits must lie"),
        ({"codec": "transform", "bits": 2, "early_bits": 4}, "go together"),
        ({"codec": "transform", "bits": 2, "early_bits": 4, "early_steps": 1, "memory": "delta"}, "leave out memory"),
        ({"codec": "quantize", "bits": 4, "tokens": 2}, "must be a rate"),
        ({"codec": "quantize", "bits": 4, "tokens": 0.1, "memory": "delta"}, "leave out memory and when"),
        ({"codec": "transform", "bits": 2, "every": 9, "when": "critical"}, "leave out memory and when"),
        ({"codec": "quantize", "bits": 4, "scale_gradient": True, "memory": "delta"}, "leave out memory and when"),
        ({"codec": "quantize", "bits": 4, "scale_gradient": 1}, "true or false"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            Wire.of({"forward": table})
    for table, said in (
        ({"codec": "quantize", "bits": 4, "tokens": 0.1}, "needs codec = 'transform'"),
        ({"codec": "transform", "bits": 4, "every": 9, "tokens": 0.1}, "without `every`"),
        ({"codec": "transform", "bits": 4, "scale_gradient": True}, "is for activations"),
    ):
        with pytest.raises(UsageError, match=said):
            Wire.of({"backward": table})
    boundary = Boundary(Link(Quantize(4), tokens=0.1))
    with pytest.raises(UsageError, match="token means need"):
        boundary.ends[0].send(Message(0, None, True), 0, torch.ones(2, 3, 64))
    with pytest.raises(ValueError, match="impossible"):
        Book.read(torch.full((Book.nbytes(4),), 9, dtype=torch.uint8), 4)
