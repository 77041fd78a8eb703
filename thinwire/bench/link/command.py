"""`thinwire bench link`: the form that was asked for."""

from __future__ import annotations

import argparse

from thinwire.bench.link import accuracy, grid
from thinwire.bench.link.options import is_grid


def run(args: argparse.Namespace) -> int:
    """Carry out `thinwire bench link` as `args` (checked) says; the exit status."""
    return grid.run(args) if is_grid(args) else accuracy.run(args)
