"""`thinwire bench scratch --formulas`: codes without messages err as the codecs do; steps are found between lengths."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
import torch

from thinwire.bench.one_process.crossing import Crossing, cross
from thinwire.bench.scratch.codes import Tokens, TransformCode
from thinwire.bench.scratch.graph import _Cross
from thinwire.bench.scratch.lengths import summed
from thinwire.bench.scratch.options import chosen, configure, planned
from thinwire.bench.scratch.rows import DENSE, ROWS, row_of
from thinwire.bench.scratch.seconds import Yardstick, bytes_per_token
from thinwire.bench.scratch.ways import code_of
from thinwire.cli import main
from thinwire.codecs import Transform, make
from thinwire.codecs.transform_fit import Moments, eigenvectors, fit
from thinwire.config.wire import Link, Wire
from thinwire.errors import UsageError
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message

WIDTH, TOKENS = 64, 9
CPU = torch.device("cpu")


def values(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of unlike directions and sizes, with something that tokens have in common, and their tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(TOKENS, (8, 32), generator=generator)
    x = torch.randn(8, 32, WIDTH, generator=generator) * torch.logspace(0, -1.5, WIDTH)
    x *= torch.exp(torch.randn(8, 32, 1, generator=generator) / 2)
    return x + torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(99))[ids], ids


def error(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y - x).square().sum() / x.square().sum())


@pytest.mark.parametrize(
    "name", [DENSE, "direct 4 bits", "rotated 4 bits", "rotated 3 bits mse", "rotated normal 2 bits"]
)
def test_formulas_err_as_the_codecs_do(name):
    x, ids = values(0)
    codec = make(**ROWS[name].codec)
    coded = codec.decode(codec.encode(x, 5), x.shape, x.dtype, 5)
    ours = code_of(ROWS[name].codec, WIDTH, TOKENS, 0.0, CPU)(x, Tokens.of(ids, TOKENS))
    assert error(ours, x) == pytest.approx(error(coded, x), rel=0.15)  # of other random signs
    assert "rotated" in name or torch.equal(ours, coded)


def test_a_book_gives_the_codec_s_own_values():
    """To a rounding: nothing is random in a learnt basis."""
    x, ids = values(0)
    codec, ours = Transform(2, every=100), TransformCode(Transform(2, every=100), WIDTH, TOKENS, 0.0, CPU)
    book = fit(codec, Moments.of(x))
    moments = Moments.of(x)
    ours.take(moments, eigenvectors(moments.products / moments.count))
    codec = codec.with_book(book)
    assert torch.allclose(ours(x, Tokens.of(ids, TOKENS)), codec.decode(codec.encode(x), x.shape, x.dtype), atol=1e-4)


def test_means_and_books_come_when_a_channel_has_them():
    """Errors of a fitted code over steps are those of a lane: both learn the same from the same."""
    link = Link(Transform(2, every=6), tokens=0.1)
    ends = [Lane(link, "forward 0→1", end, 0) for end in ("send", "recv")]
    ours = TransformCode(Transform(2, every=6), WIDTH, TOKENS, 0.1, CPU)
    for step in range(12):
        x, ids = values(step)
        message = Message(0, None, True, tokens=ids)
        for lane in ends:
            lane.begin(step)
        y = ends[1].recv(message, 0, ends[0].send(message, 0, x), x.shape, x.dtype)
        for lane in ends:
            lane.resolve_checks()
            lane.end_step(keep=True)
        ours.before(step)
        assert error(ours(x, Tokens.of(ids, TOKENS)), x) == pytest.approx(error(y, x), rel=0.1), step
    assert ours.made and ends[1].coded[0].codec.book is not None


@pytest.mark.parametrize(
    "way, next_codec", [({"codec": "quantize", "bits": 3}, "bf16"), ({"codec": "transform", "bits": 2}, "transform")]
)
def test_gradients_pass_through_a_code_as_a_lane_s_do(way, next_codec):
    """Exactly where nothing is random; of a rotated code as far as other signs allow, on average."""
    back = {"codec": "transform", "bits": 8} if next_codec == "transform" else {"codec": "cast", "to": "bf16"}
    x, ids = values(0)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    crossing = Crossing(Wire.of({"forward": {**way, "scale_gradient": True}, "backward": back}), 0, 0)
    for lane in crossing.all():
        lane.begin(0)
    leaf = x.clone().requires_grad_()
    cross(leaf, crossing, [Message(0, None, True)] * 2).backward(g)
    there, turned = code_of(way, WIDTH, TOKENS, 0.0, CPU, through=True), code_of(back, WIDTH, TOKENS, 0.0, CPU)
    tokens = Tokens.of(ids, TOKENS)
    other = x.clone().requires_grad_()
    _Cross.apply(other, (tokens, tokens), there, turned).backward(g)
    added, ours = leaf.grad - g, other.grad - g
    assert float(added.norm()) > 0.02 * float(g.norm())
    if next_codec == "bf16":
        assert torch.allclose(leaf.grad, other.grad, atol=1e-5)
    assert float(ours.norm()) == pytest.approx(float(added.norm()), rel=0.1)


def test_names_of_rows_say_what_they_are():
    parser = argparse.ArgumentParser()
    configure(parser)
    name = "tokens both ways + normal 2 back 2 through of 0.5"
    assert [row.name for row in chosen(parser.parse_args(["--only", f"{name}, fp32"]))] == [DENSE, name, "fp32"]
    row = row_of("tokens both ways + normal 2.5 back 2 through of 0.5")
    assert (row.codec["bits"], row.back["bits"], row.share, row.tables, row.through) == (2.5, 2.0, 0.5, True, True)
    assert row.tokens > 0 and row.next > 0 and row.rank(64) == 32 and row.messages and row.formulas
    plain = row_of("tokens + normal 2 back 2")
    assert (plain.next, plain.through, plain.share) == (0, False, 1.0)
    assert row_of("bf16 of 0.25").tables and row_of("bf16 of 0.25").rank(1024) == 256


def test_bits_that_change_are_priced_by_their_shares():
    late = replace(ROWS["tokens + basis 2 back 2"], phases=((0.75, 4, 4),))
    least, most = (bytes_per_token(ROWS[f"tokens + basis {b} back {b}"], Yardstick()) for b in (2, 4))
    assert bytes_per_token(late, Yardstick()) == pytest.approx(0.75 * least + 0.25 * most)


def test_runs_that_were_cut_short_are_left_out():
    def one(row: str, length: float, loss: float, done: int = 10) -> dict:
        return {"row": row, "rate": 1, "seed": 0, "length": length, "losses": [[1, loss]], "done": done, "steps": 10}

    runs = [one(DENSE, 1, 2.0), one("rotated 4 bits", 1.5, 1.95), one("direct 4 bits", 1.0, 2.1)]
    runs += [one("direct 4 bits", 1.5, 1.0, 5)]
    found = {row["row"]: row for row in summed(runs)}
    assert found["rotated 4 bits"]["steps_ratio"] == 1.5  # at most
    assert list(found["direct 4 bits"]["percent"]) == ["1.0"]
    assert found["direct 4 bits"]["time_ratio"] is None and found[DENSE]["time_ratio"] == 1


def test_the_command_runs_resumes_and_draws(tmp_path, capsys):
    out = tmp_path / "rows.json"
    words = ["bench", "scratch", "--quick", "--formulas", "--stages", "2", "--steps", "4", "--every", "2",
             "--decay", "0.4", "--only", "tokens + basis 2 back 2", "--lengths", "1,1.5", "--json",
             str(out)]  # fmt: skip
    assert main([*words, "--figure", str(tmp_path / "f.png")]) == 0
    document = json.loads(out.read_text())
    assert [(one["row"], one["steps"]) for one in document["runs"]].count((DENSE, 4)) == 1 and len(
        document["runs"]
    ) == 3
    assert (tmp_path / "f.png").stat().st_size > 10_000 and "T / T dense" in capsys.readouterr().out
    assert main([*words, "--resume"]) == 0
    assert json.loads(out.read_text())["runs"] == document["runs"]
    assert main([*words, "--lengths", "wings"]) == 2


def test_a_plan_names_runs_in_order_and_bits_that_change(tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text("2e-3 1 1.2 tokens + basis 6 back 4, 2 back 3 from 0.1\n\n1e-3 0 1 dense bf16\n")
    args = argparse.Namespace(plan=str(plan))
    (row, *rest), second = planned(args)
    assert (rest, row.phases, row.codec["bits"], row.back["bits"]) == ([2e-3, 1, 1.2], ((0.1, 2.0, 3.0),), 6.0, 4.0)
    assert (second[0].name, *second[1:]) == ("dense bf16", 1e-3, 0, 1.0)
    plan.write_text("1e-3 0 dense\n")
    with pytest.raises(UsageError, match="rate seed times row"):
        planned(args)
    plan.write_text("1e-3 0 1 denser\n")
    with pytest.raises(UsageError, match="no row"):
        planned(args)


def test_steps_stand_beside_dense_s_at_the_same_loss():
    def one(row: str, length: float, loss: float, seed: int) -> dict:
        return {"row": row, "rate": 1, "seed": seed, "length": length, "losses": [[1, loss]], "done": 10, "steps": 10}

    runs = [one(DENSE, 0.25, 2.4, 0), one(DENSE, 1.0, 2.0, 0), one(DENSE, 1.0, 2.1, 1)]
    runs += [one("rotated 4 bits", 1.0, 2.2, 0), one("rotated 4 bits", 1.0, 2.3, 1)]
    found = {row["row"]: row for row in summed(runs)}["rotated 4 bits"]
    assert found["steps"] == {"0": pytest.approx(2), "1": pytest.approx(2)}  # half of dense's, by logarithms
    assert found["percent"]["1.0"]["0"] == pytest.approx(10)


def test_the_bound_of_all_codes_is_below_what_the_codec_errs():
    """It is below what the codec errs."""
    x, ids = values(0)
    moments = Moments.of(x)
    found = []
    for name in ("ideal tokens + basis 1 back 1", "tokens + basis 1 back 1"):
        code = code_of(row_of(name).codec, WIDTH, TOKENS, 0.0, CPU)
        code.take(moments, eigenvectors(moments.products / moments.count))
        found.append(error(code(x, Tokens.of(ids, TOKENS)), x))
    assert found[0] < 0.7 * found[1]
