"""How a test launches ranks on a network of the lab, and looks at what their cases found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rank_cases import Case, Found, name_of

from thinwire.lab import LabError, Network, check

SHOWN = 12  # failures of a case that a test lists
needs_network = pytest.mark.skipif(
    not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"
)
on_a_network = [pytest.mark.lab, needs_network]


def launch(net: Network, program: Callable[..., Any], *arguments: Any, timeout: float, per_host: int = 1) -> list[Any]:
    """Every rank's answer; where none comes, the ranks' last lines are in the error."""
    job = net.start(program, *arguments, per_host=per_host, echo=False)
    try:
        return list(job.wait(timeout))
    except LabError as error:
        last = [f"{place.label} | {line}" for place in job.placements for line in job.output(place.rank)[-2:]]
        raise LabError("\n".join([str(error), *last])) from error


def passed(ranks: Sequence[Found], case: Case) -> None:
    """Fail the test unless the case passed on every rank; the first failure stands first."""
    name = name_of(case)
    failures = sorted(failure for found in ranks for failure in found[name])
    lines = [f"rank {failure.rank}: {failure.message}" for failure in failures]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    if lines:
        pytest.fail("\n".join([f"case {name}", *lines[:SHOWN], *more]), pytrace=False)
