"""What the benches that pre-train and fine-tune have in common: options, names that must be known, their folder."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError

COUNTS = ("seeds", "epochs", "samples", "pretrain")
KINDS = ("forward", "backward", "gradient", "embedding")


def add_options(parser: argparse.ArgumentParser, *, epochs: int, pretrain: int, out: str) -> None:
    """Give `parser` the common options; `epochs`, `pretrain` and `out` are their defaults."""
    parser.add_argument("--seeds", type=int, default=3, help="paired: same data order, same start (default 3)")
    parser.add_argument("--epochs", type=int, default=epochs, help=f"of fine-tuning (default {epochs})")
    parser.add_argument("--samples", type=int, default=192, help="to fine-tune on (default 192)")
    parser.add_argument("--pretrain", type=int, default=pretrain, help=f"steps before (default {pretrain})")
    parser.add_argument("--out", default=out, help=f"folder of the runs (default {out})")


def check_counts(args: argparse.Namespace) -> None:
    """Refuse `args` whose numbers are not positive."""
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: must be 1 or more")


def chosen(option: str, given: str, known: Collection[str]) -> list[str]:
    """The names in `given`, with commas between them; a mistake of `option` where one is not in `known`."""
    names = given.split(",")
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: allowed are {', '.join(known)}")
    return names


def check_folder(folder: Path, mark: str) -> None:
    """Is `folder` empty, or a bench's own, which has `mark` in it?"""
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise UsageError(f"--out {folder}: holds files that are not this bench's; name another folder")


def windows(samples: int, held_out: float) -> int:
    """So many that `samples` are left for training without the `held_out` share."""
    return round(samples / (1 - held_out))


def sent(event: dict[str, Any]) -> dict[str, int]:
    """Bytes by kind of traffic, up to the step of `event`."""
    return {kind: event[f"{kind}_bytes"] for kind in KINDS}
