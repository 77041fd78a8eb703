"""Folders of models and tokenizers that would run code when loaded are refused: only data is read."""

from __future__ import annotations

import json
from pathlib import Path

from thinwire.errors import UsageError

DESCRIPTIONS = ("config.json", "tokenizer_config.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # weights as torch.save writes them


def refuse_own_code(source: str | Path) -> None:
    """UsageError where a checkpoint brings code of its own (`auto_map` in a description).

    source: its folder, or a config.json. Other mistakes in it are for the reader to find.
    """
    path = Path(source)
    for file in [path] if path.is_file() else [path / name for name in DESCRIPTIONS]:
        try:
            said = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # absent, or no JSON
        if isinstance(said, dict) and said.get("auto_map"):
            raise UsageError(
                f"{file}: needs Python code that comes with it (auto_map), which is not run; where transformers knows "
                "this model itself, remove auto_map from the file"
            )


def pickled_weights(folder: Path) -> str:
    """The name of a file in the folder that holds weights as a pickle; "" where there is none."""
    found = sorted(file.name for file in folder.glob("*") if file.suffix in PICKLES)
    return found[0] if found else ""
