"""Files of a checkpoint, damaged at random: a checkpoint is refused, or what is loaded equals what was saved."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from thinwire.distributed.checkpoint_files import LIST, write_checksums
from thinwire.errors import UsageError
from thinwire.train.checkpoint import Checkpoints

FUZZ = int(os.environ.get("THINWIRE_FUZZ", "300"))
STEPS = (1, 2)
Files = dict[str, bytes]


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(8, 5, generator=generator),
        "model/half": torch.randn(7, generator=generator).bfloat16(),
        "rank-0/rng": torch.randint(256, (33,), generator=generator).byte(),
        "step": torch.tensor(step),
    }


def saved(folder: Path, lists: int) -> Checkpoints:
    """Two checkpoints; their files on so many lists, as several ranks would write them."""
    kept = Checkpoints(folder, keep=9)
    for step in STEPS:
        path = kept.save(step, state(step))
        if lists > 1:
            files = sorted(file for file in path.iterdir() if not LIST.fullmatch(file.name))
            next(path.glob("checksums-*")).unlink()
            for rank in range(lists):
                write_checksums(path, files[rank::lists], rank, lists)
    return kept


def files_of(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def write(folder: Path, files: Files) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def flip_bits(name: str, files: Files, other: Files, pick: random.Random) -> None:
    content = bytearray(files[name])
    for _ in range(pick.randint(1, 4)):
        content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
    files[name] = bytes(content)


def overwrite(name: str, files: Files, other: Files, pick: random.Random) -> None:
    start = pick.randrange(len(files[name]))
    junk = pick.randbytes(pick.randint(1, 64))
    files[name] = files[name][:start] + junk + files[name][start + len(junk) :]


def truncate(name: str, files: Files, other: Files, pick: random.Random) -> None:
    files[name] = files[name][: pick.randrange(len(files[name]))]


def grow(name: str, files: Files, other: Files, pick: random.Random) -> None:
    files[name] += pick.randbytes(pick.randint(1, 64))


def swap_with_other_checkpoint(name: str, files: Files, other: Files, pick: random.Random) -> None:
    files[name] = other[name]


def swap_with_other_file(name: str, files: Files, other: Files, pick: random.Random) -> None:
    second = pick.choice(sorted(files))
    files[name], files[second] = files[second], files[name]


def delete(name: str, files: Files, other: Files, pick: random.Random) -> None:
    del files[name]


def add(name: str, files: Files, other: Files, pick: random.Random) -> None:
    files[pick.choice(["more", "__9_0.distcp", "checksums-1of2.json", "checksums-7of9.json"])] = files[name]


MUTATIONS = (
    flip_bits, overwrite, truncate, grow, swap_with_other_checkpoint, swap_with_other_file, delete, add,
)  # fmt: skip


def loaded(kept: Checkpoints) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Which of the steps is loaded, by its folder's name, and what it holds; None: refused in one line."""
    try:
        path = kept.newest_sound(lambda line: None)
        assert path is not None
        return int(path.name.removeprefix("step-")), kept.read(path, lambda name: True)
    except UsageError as error:
        assert "\n" not in str(error)
        return None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lists", [1, 2])
def test_a_mutated_checkpoint_is_refused_or_loads_equal(tmp_path, alone, lists):
    """THINWIRE_FUZZ=10000 runs the long version; half of them with each number of lists."""
    kept, pick, counts = saved(tmp_path, lists), random.Random(FUZZ + lists), Counter()
    older, newest = (tmp_path / f"step-{step:08d}" for step in STEPS)
    whole, other = files_of(newest), files_of(older)
    for number in range(FUZZ // 2):
        files, mutation = dict(whole), pick.choice(MUTATIONS)
        name = pick.choice(sorted(files))
        mutation(name, files, other, pick)
        write(newest, files)
        found = loaded(kept)
        said = f"mutation {number}, {mutation.__name__} of {name}"
        counts["refused" if found is None else f"step {found[0]}"] += 1
        if found is None:
            continue
        for key, value in state(found[0]).items():
            assert torch.equal(found[1][key], value), f"{said}: {key} was loaded wrong"
        assert found[1].keys() == state(found[0]).keys(), said
        changed = {file for file in whole | files if whole.get(file) != files.get(file)}
        assert found[0] == STEPS[0] or changed <= {n for n in whole if LIST.fullmatch(n)}, f"{said} was not noticed"
    print(f"\n{FUZZ // 2} mutations, {lists} list(s): {dict(counts)}")
    assert counts[f"step {STEPS[0]}"] > 0.8 * (FUZZ // 2)
