"""What the results must show, each claim as a line PASS or FAIL with the numbers on which it is based."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from thinwire.theory.experiments import NEAR, Results
from thinwire.theory.simulate import STOP, Trace

EXACT = ("STAR", "STAR + Top-K", "DIANA", "generalised DIANA", "Rand-DIANA", "VR-GDCI", "EF21", "EControl")
STALLS = 1e3 * STOP  # an error above this at the end is no rounding
AGREE = 0.05  # DIANA's and Rand-DIANA's iterations
SLOPE = (-0.65, -0.4)  # of log ‖∇f‖² against log T, theory says −½
LINEAR = (0.8, 1.2)  # of log iterations against log κ, theory says 1; earlier analyses of GDCI had κ²


@dataclass(frozen=True)
class Check:
    """One claim, whether it passed, and the numbers on which that is based."""

    claim: str
    passed: bool
    numbers: str


def verify(results: Results) -> list[Check]:
    """Every claim that can be checked on these results."""
    found: list[Check] = []
    if "methods" in results.traces:
        found += _comparison(results.traces["methods"])
    if "workers" in results.traces:
        found += _different_workers(results.traces["workers"])
    if "kappa" in results.traces:
        found += _conditions(results.traces["kappa"])
    if "logistic" in results.traces:
        found += _logistic(results.traces["logistic"])
    if "interpolation" in results.traces:
        found += _interpolation(results.traces["interpolation"])
    if results.two_stage:
        found += _two_stage(results.two_stage)
    return found


def iterations(trace: Trace, target: float = STOP) -> list[float]:
    """Per run the iterations to `target`, ∞ where it is not reached."""
    return [math.inf if p is None else trace.steps[p] for p in trace.reached(target)]


def bits(trace: Trace, unit: str, target: float = STOP) -> list[float]:
    """Per run the bits to `target`, ∞ where it is not reached."""
    sent = trace.bits(unit)
    return [math.inf if p is None else sent[p][run] for run, p in enumerate(trace.reached(target))]


def megabits(trace: Trace, unit: str) -> list[float]:
    """Per run the megabits to STOP, in "paper" or "real" bits; ∞ where it is not reached."""
    return [b / 1e6 for b in bits(trace, unit)]


def slopes(curve: dict[int, list[float]]) -> list[float]:
    """Slopes in the log-log plot between neighbouring horizons, of the runs' mean; `curve`: horizon → value per run."""
    points = sorted((t, sum(values) / len(values)) for t, values in curve.items())
    return [math.log(b / a) / math.log(t1 / t0) for (t0, a), (t1, b) in pairwise(points)]


def _comparison(traces: dict[str, Trace]) -> Iterator[Check]:
    for name in ("DCGD", "FIXED", "GDCI"):
        yield _within_radius(name, traces[name])
    floors = traces["EF14"].floor()
    yield Check("EF14 stalls (no radius is claimed)", all(f > STALLS for f in floors), _show(floors))
    for label, trace in traces.items():
        if label.partition(",")[0] in EXACT:
            yield _reaches(label, trace)
    yield _ordered("STAR + Top-K", "STAR", "iterations", iterations, traces)
    yield _ordered("generalised DIANA", "DIANA", "iterations", iterations, traces)
    for unit in ("paper", "real"):
        yield _ordered("DIANA", "generalised DIANA", f"{unit} Mbit", partial(megabits, unit=unit), traces)
    yield _ordered("DIANA", "Rand-DIANA", "paper Mbit", partial(megabits, unit="paper"), traces)
    gaps = [abs(a / b - 1) for a, b in zip(*(iterations(traces[m]) for m in ("Rand-DIANA", "DIANA")))]
    claim = f"DIANA and Rand-DIANA agree in iterations within {AGREE:.0%}"
    yield Check(claim, all(g <= AGREE for g in gaps), ", ".join(f"{g:.2%}" for g in gaps))


def _within_radius(name: str, trace: Trace) -> Check:
    """It stalls, and no farther from x* than its theorem says."""
    floors, radii = trace.floor(), trace.radius or []
    held = bool(radii) and all(STALLS < f <= r for f, r in zip(floors, radii))
    claim = f"{name} stalls within the radius of its theorem"
    return Check(claim, held, f"{_show(floors)} against {_show(radii)}")


def _different_workers(traces: dict[str, Trace]) -> Iterator[Check]:
    for label, trace in traces.items():
        yield _reaches(label, trace) if trace.method.exact else _within_radius(label, trace)


def by_condition(traces: dict[str, Trace]) -> dict[str, list[tuple[float, float]]]:
    """By method, (κ, iterations to NEAR), κ ascending; of the first run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for label, trace in traces.items():
        method, _, kappa = label.partition(", κ = ")
        found.setdefault(method, []).append((float(kappa), iterations(trace, NEAR)[0]))
    return {method: sorted(points) for method, points in found.items()}


def _conditions(traces: dict[str, Trace]) -> Iterator[Check]:
    low, high = LINEAR
    for method, points in by_condition(traces).items():
        (first, least), (last, most) = points[0], points[-1]
        slope = math.log(most / least) / math.log(last / first)
        claim = f"{method}'s iterations grow as κ, not as κ²"
        shown = ", ".join(f"{count:,.0f} at κ = {kappa:.0f}" for kappa, count in points)
        yield Check(claim, low <= slope <= high, f"slope {slope:.2f}: {shown}")


def _logistic(traces: dict[str, Trace]) -> Iterator[Check]:
    for label, trace in traces.items():
        if trace.method.exact:
            yield _reaches(f"logistic: {label}", trace)
        else:
            floors = trace.floor()
            yield Check(f"logistic: {label} stalls above 1e-10", min(floors) > 1e-10, _show(floors))


def _interpolation(traces: dict[str, Trace]) -> Iterator[Check]:
    for label, trace in traces.items():
        if trace.method.exact:
            yield _reaches(f"interpolation: {label}", trace)


def _two_stage(curves: dict[str, dict[int, list[float]]]) -> Iterator[Check]:
    low, high = SLOPE
    last = {name: slopes(curve)[-2:] for name, curve in curves.items()}
    for name in [line for line in curves if line != "direct"]:
        claim = f"two-stage: ‖∇f‖² falls with T at a slope of about −½ ({name})"
        yield Check(claim, all(low <= s <= high for s in last[name]), _show(last[name]))
    direct = last["direct"]
    flattens = direct[-1] > -0.25 and direct[-1] > direct[0]
    yield Check("two-stage: direct compression flattens out", flattens, _show(direct))
    horizon = max(curves["delta"])
    ratios = [a / b for a, b in zip(curves["direct"][horizon], curves["delta"][horizon])]
    claim = f"two-stage: direct ends at over 3 times delta's ‖∇f‖² (T = {horizon})"
    yield Check(claim, min(ratios) > 3, _show(ratios))


def _reaches(name: str, trace: Trace) -> Check:
    taken = iterations(trace)
    return Check(f"{name} reaches {STOP:g}", all(map(math.isfinite, taken)), _show(taken, "iterations"))


def _ordered(
    less: str, more: str, unit: str, measure: Callable[[Trace], Sequence[float]], traces: dict[str, Trace]
) -> Check:  # fmt: skip
    a, b = measure(traces[less]), measure(traces[more])
    claim = f"{less} needs fewer {unit} than {more}"
    return Check(claim, all(x < y for x, y in zip(a, b)), f"{_show(a)} against {_show(b)}")


def _show(values: Sequence[float], unit: str = "") -> str:
    return ", ".join(f"{v:.3g}" if v < 1e3 else f"{v:,.0f}" for v in values) + (f" {unit}" if unit else "")
