"""The theory bench: the problems' constants, the rows of methods, and the assertions that theory allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire import cli
from thinwire.codecs import Identity, Induced, Natural, NaturalDither, RandK, TopK
from thinwire.theory import bits, bounds, checks, command, experiments, methods, problems, steps, summary, two_stage
from thinwire.theory.checks import Check
from thinwire.theory.experiments import Results
from thinwire.theory.mixed import Mixed
from thinwire.theory.simulate import EVERY, seeds_of, simulate

pytestmark = pytest.mark.timeout(600)  # one long run is shared; the machine may be busy
SEEDS = [0]
SETTINGS = [problems.ridge, problems.interpolation, problems.logistic, lambda s: problems.logistic(s, "by label")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other longer than these small tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results() -> Results:
    """One run of what the assertions need, shared by the tests below: what --quick runs."""
    tasks = experiments.plan(("ridge", "interpolation", "two-stage"), SEEDS, quick=True)
    return experiments.run(tasks, Results(SEEDS), lambda note, done: None)


@pytest.fixture(scope="module")
def verified(results: Results) -> dict[str, Check]:
    return {check.claim: check for check in checks.verify(results)}


# --- what theory allows to assert, at q = 0.3 (ω = 2.33)


def test_every_check_passes(verified: dict[str, Check]) -> None:
    assert len(verified) >= 23
    assert not [check for check in verified.values() if not check.passed]


@pytest.mark.parametrize(
    ("figure", "label"), [("methods", "DCGD"), ("methods", "FIXED"), ("methods", "GDCI"), ("workers", "DCGD, ω_i")]
)
def test_inexact_methods_stall_within_the_radius_of_their_theorem(results: Results, figure: str, label: str) -> None:
    """And the theorem says something: its radius is far below where they began."""
    trace = results.traces[figure][label]
    assert 1e-15 < trace.floor()[0] <= trace.radius[0] < 0.02


def test_radii_by_hand() -> None:
    """(2γ/μ)·mean (ω_i/n)‖∇f_i* − h_i‖², and for points 2η·mean (ω_i/n)‖x* − γ∇f_i*‖²; unlike workers their own ω_i."""
    problem, start = problems.ridge([0]), problems.ridge([0]).solution.square().sum()
    at_solution = problem.gradients(problem.solution)[0]
    unlike = Mixed(tuple(RandK(0.5) if i % 2 else Identity() for i in range(10)))
    gamma, mu = 1 / (problem.L + 0.2 * problem.L_i[:, 1::2].max()), problem.mu
    expected = 2 * gamma / mu * sum(0.1 * at_solution[i].square().sum() for i in range(1, 10, 2)) / 10 / start
    assert bounds.radius(methods.dcgd(unlike), problem)[0] == pytest.approx(float(expected))
    points = methods.gdci(RandK(0.5))
    step = points.rule(problem, points.codec)
    sent = problem.solution - step.gamma * at_solution
    assert bounds.radius(points, problem)[0] == pytest.approx(
        float(0.2 * step.eta * sent.square().sum(1).mean() / start)
    )
    assert bounds.radius(methods.diana(RandK(0.5)), problem) is None


def test_unlike_workers_are_coded_by_their_own_codecs() -> None:
    codecs = tuple(RandK(0.1 * (i + 1)) for i in range(10))
    x = torch.randn(20, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = Mixed(codecs).rows(x, list(range(20)))
    for row in range(20):
        assert torch.equal(together[row], codecs[row % 10].rows(x[row][None], [row])[0])


def test_compressed_points_take_iterations_in_proportion_to_kappa(results: Results) -> None:
    for points in checks.by_condition(results.traces["kappa"]).values():
        ratios = [count / kappa for kappa, count in points]
        assert len(points) == 5 and max(ratios) < 2 * min(ratios)


@pytest.mark.parametrize("method", checks.EXACT)
def test_exact_methods_reach_the_last_error(results: Results, verified: dict[str, Check], method: str) -> None:
    q = experiments.MILD.get(method)
    label = method if q is None else f"{method}, q = {q}"
    assert results.traces["methods"][label].error[-1][0] <= 1e-18 and f"{label} reaches 1e-18" in verified


def test_iterations_are_the_sheet_s(results: Results) -> None:
    taken = {name: checks.iterations(trace)[0] for name, trace in results.traces["methods"].items()}
    assert taken["STAR + Top-K"] < taken["STAR"]
    assert taken["DIANA"] == pytest.approx(36_000, rel=0.05)
    assert taken["generalised DIANA"] == pytest.approx(29_500, rel=0.05)
    assert taken["Rand-DIANA"] == pytest.approx(taken["DIANA"], rel=0.05)


def test_generalised_diana_wins_in_iterations_and_loses_in_bits(results: Results) -> None:
    general, plain = (results.traces["methods"][name] for name in ("generalised DIANA", "DIANA"))
    assert checks.iterations(general)[0] < checks.iterations(plain)[0]
    for unit in ("paper", "real"):
        assert checks.bits(general, unit)[0] > 1.5 * checks.bits(plain, unit)[0]


def test_rand_diana_pays_for_its_refreshes(results: Results) -> None:
    """At p = q the dense messages double the bits."""
    rand, plain = (results.traces["methods"][name] for name in ("Rand-DIANA", "DIANA"))
    assert checks.bits(rand, "paper")[0] == pytest.approx(2 * checks.bits(plain, "paper")[0], rel=0.05)


def test_dcgd_is_exact_where_the_problem_interpolates(results: Results) -> None:
    traces = results.traces["interpolation"]
    assert traces["DCGD, q = 0.3"].error[-1][0] <= 1e-18
    assert traces["DCGD on ridge, q = 0.3"].floor()[0] > 1e-9


def test_delta_keeps_the_slope_and_direct_stalls(results: Results) -> None:
    curves = results.two_stage
    assert all(-0.65 < slope < -0.4 for slope in checks.slopes(curves["delta"])[-2:])
    assert checks.slopes(curves["direct"])[-1] > -0.25
    last = max(curves["delta"])
    assert curves["delta"][last] == pytest.approx(curves["exact"][last], rel=0.05)
    assert curves["direct"][last][0] > 3 * curves["delta"][last][0]


# --- the parts


@pytest.mark.parametrize("make", SETTINGS)
def test_gradients_are_those_of_the_objective(make) -> None:
    problem = make([3, 4])
    x = torch.linspace(-1, 1, 2 * problem.dim, dtype=torch.float64).view(2, -1).requires_grad_()
    (slope,) = torch.autograd.grad(_objective(problem, x).sum(), x)
    torch.testing.assert_close(problem.gradients(x.detach()).mean(dim=1), slope, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", SETTINGS)
def test_constants_bound_the_curvature(make) -> None:
    problem = make([0, 1])
    assert problem.gradients(problem.solution).mean(dim=1).abs().max() < 1e-9
    for run in range(2):
        x = problem.solution.clone()

        def loss(point: Tensor, run: int = run, x: Tensor = x) -> Tensor:
            return _objective(problem, torch.cat((x[:run], point[None], x[run + 1 :])))[run]

        eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, x[run]))
        flat = problem.dim - 60 if problem.normal is not None else 0
        assert eigenvalues[-1] <= problem.L[run, 0] * (1 + 1e-9)
        assert eigenvalues[flat] >= problem.mu[run, 0] * (1 - 1e-9)
        assert problem.L[run, 0] <= problem.L_i[run].mean() <= problem.L_max[run, 0]


def _objective(problem: problems.Problem, x: Tensor) -> Tensor:
    """f(x) written out: [S]."""
    z = (problem.a.view(x.shape[0], -1, problem.dim) @ x[:, :, None])[:, :, 0]
    if problem.slope is problems.squares:
        losses = (z - problem.b).square() / 2
    else:
        losses = torch.nn.functional.softplus(-problem.b * z)
    return problem.weight / problem.workers * losses.sum(1) + problem.lam / 2 * x.square().sum(1)


def test_runs_side_by_side_equal_runs_alone() -> None:
    together = simulate(methods.diana(RandK(0.3)), problems.ridge([5, 6]), [5, 6], limit=200)
    alone = simulate(methods.diana(RandK(0.3)), problems.ridge([6]), [6], limit=200)
    assert [row[1] for row in together.error] == pytest.approx([row[0] for row in alone.error], rel=1e-9)


def test_diana_is_the_paper_s_diana() -> None:
    """Straight lines: m = Q(∇f_i − h_i), x ← x − γ(h̄ + m̄), h_i ← h_i + m_i/(1 + ω)."""
    problem, codec = problems.ridge([0]), RandK(0.3)
    gamma = 1 / (float(problem.L_max) * (1 + 6 * (80 / 24 - 1) / 10))
    x, h, errors = torch.zeros(80, dtype=torch.float64), torch.zeros(10, 80, dtype=torch.float64), []
    for t, seeds in zip(range(2 * EVERY), seeds_of([0], 10)):
        m = codec.rows(problem.gradients(x[None])[0] - h, seeds)
        x = x - gamma * (h.mean(0) + m.mean(0))
        h = h + 0.3 * m
        if (t + 1) % EVERY == 0:
            errors.append(float((x - problem.solution[0]).square().sum() / problem.solution.square().sum()))
    trace = simulate(methods.diana(codec), problem, [0], limit=2 * EVERY)
    assert [row[0] for row in trace.error[1:]] == pytest.approx(errors, rel=1e-9)


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    before, numpy_before, threads = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_num_threads()
    problem = problems.ridge([0])
    for method in (methods.fixed(RandK(0.3), problem), methods.rand_diana(NaturalDither(3), problem)):
        simulate(method, problem, [0], limit=EVERY)
    two_stage.train(two_stage.lines()[2], [0], 10)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])
    assert torch.get_num_threads() == threads


def test_sweeps_take_all_seeds_but_the_slow_plotted_step() -> None:
    tasks = [t for t in experiments.plan(("ridge",), [0, 1], quick=False) if t.figure in ("randk", "dither")]
    taken = {t.label: t.make.args[2] for t in tasks}
    assert len(tasks) == 3 * 3 + 3 * 3 - 1  # natural dithering with three levels is without it
    assert all(seeds == ([0] if experiments.PLOTTED in label else [0, 1]) for label, seeds in taken.items())
    assert summary._range([27.2, 45.1]) == "27 to 45" and summary._range([27.2]) == "27"


def test_seeds_differ_in_run_step_and_worker() -> None:
    stream = seeds_of([0, 1], 10)
    drawn = [seed for _ in range(1100) for seed in next(stream)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**63 for seed in drawn)
    alone = seeds_of([1], 10)
    assert [next(alone) for _ in range(600)][599] == drawn[599 * 20 + 10 : 600 * 20]


@pytest.mark.parametrize(
    ("codec", "paper"),
    [
        (Identity(), 2560),
        (RandK(0.3), 768),
        (TopK(0.3), 768),
        (Natural(), 720),
        (NaturalDither(8), 432),
        (Induced(TopK(0.3), RandK(0.3)), 1536),
    ],
)
def test_bits_of_a_message(codec, paper: int) -> None:
    assert bits.paper_bits(codec, 80) == paper
    assert bits.real_bits(codec, 80) == 8 * codec.encode(torch.randn(80)).numel()


def test_step_sizes_by_hand() -> None:
    problem, codec = problems.ridge([0]), RandK(0.5)  # ω = 1
    L, top, mu = (float(t) for t in (problem.L, problem.L_max, problem.mu))
    assert float(steps.dcgd(problem, codec).gamma) == pytest.approx(1 / (L + 0.2 * top))
    assert float(steps.star(problem, Induced(TopK(0.5), codec)).gamma) == pytest.approx(1 / (L + 0.05 * top))
    assert float(steps.diana(problem, codec).gamma) == pytest.approx(1 / (1.6 * top))
    assert float(steps.rand_diana(problem, codec).gamma) == pytest.approx(1 / (1.2 * top + 0.4 * top))
    assert float(steps.diana_plotted(problem, codec).gamma) == pytest.approx(1 / (10 * top))
    mixed = steps.vr_gdci(problem, codec)
    assert float(mixed.effective) == pytest.approx(1 / (L + 0.6 * (top - mu)))
    with pytest.raises(ValueError, match="not unbiased"):
        steps.diana(problem, TopK(0.5))
    with pytest.raises(ValueError, match="not contractive"):
        steps.ef21(problem, codec)


def test_the_checks_bite(results: Results) -> None:
    """EF14's trace under EF21's name fails, and nothing else does."""
    faked = dict(results.traces["methods"])
    faked["EF21, q = 0.9"] = faked["EF14"]
    failed = [check.claim for check in checks.verify(Results(SEEDS, {"methods": faked})) if not check.passed]
    assert failed == ["EF21, q = 0.9 reaches 1e-18"]


# --- the command


def test_command_draws_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, target = tmp_path / "figures", tmp_path / "result.json"
    words = ["convex", "--problem", "interpolation", "--quick", "--out", str(out), "--json", str(target)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "DCGD, q = 0.3" in printed and "PASS" in printed and "FAIL" not in printed
    assert (out / "convex-interpolation.png").read_bytes()[:4] == b"\x89PNG"
    assert str(out / "convex-interpolation.png") in printed
    document = json.loads(target.read_text())
    assert {row["label"] for row in document["rows"]} >= {"GD", "DCGD, q = 0.3"}
    assert all(check["passed"] for check in document["checks"])


def test_a_failed_check_is_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "HORIZONS", (16, 32, 64, 128, 256))
    monkeypatch.setattr(command, "verify", lambda results: [Check("two and two is five", False, "4")])
    assert cli.main(["convex", "--problem", "two-stage", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0"], "--seeds must be 1"),
        (["--seeds", "two"], "invalid int value"),
        (["--problem", "travelling-salesman"], "invalid choice"),
        (["--out", "/dev/null/figures"], "cannot make --out"),
        (["--json", "/dev/null/result.json"], "cannot write"),
    ],
)
def test_bad_options_are_one_line(words: list[str], said: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(["convex", *words])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err
