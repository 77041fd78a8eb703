"""Checkpoints by torch.distributed.checkpoint: flat names, complete or absent, the last K kept.

    out/checkpoints/step-00000100/      one folder, where all ranks see it
    out/checkpoints/step-00000100/rank-3/    one per rank, where machines share no folder

What all replicas have in common (model/…, optim/…) is stored once; what belongs to one rank has the rank in its name.
A folder is written under a temporary name, its files are listed with their checksums, and it is renamed when every rank
is done. So a folder with its final name is complete, and a file that changed afterwards is found before loading.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from thinwire.distributed.checkpoint_files import METADATA, CheckpointReader, find_damage, lists_of, write_checksums
from thinwire.distributed.values import broadcast_json, gather_json
from thinwire.errors import RunFailed, UsageError
from thinwire.train.model.tensor_parallel import plain_name

CHECKPOINTS = "checkpoints"
PREFIX = "step-"
UNFINISHED = ".part"


@contextmanager
def _without_warning() -> Iterator[None]:
    """torch warns wherever `no_dist` is set; here it is set on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def whole(folder: Path) -> list[Path]:
    """The finished checkpoints in `folder`, oldest first."""
    found = folder.iterdir() if folder.exists() else ()  # not glob, which passes over a folder it cannot read
    return sorted(p for p in found if p.name.startswith(PREFIX) and p.name.removeprefix(PREFIX).isdigit())


def refuse_second_run(out: Path, resume: bool) -> None:
    """UsageError where the folder `out` holds checkpoints of a run and `resume` is false."""
    found = whole(out / CHECKPOINTS)
    if found and not resume:
        step = int(found[-1].name.removeprefix(PREFIX))
        raise UsageError(f"{out} holds a run already (step {step}): use --resume, or another [run] out")


class Checkpoints:
    """The checkpoints of one run. Every method but `newest` is called by all ranks together.

    folder: where they are. keep: how many are kept. local_rank: this rank's number on its machine.
    """

    def __init__(self, folder: str | Path, keep: int = 2, local_rank: int = 0) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.local_rank = local_rank
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.shared = self._is_shared()

    def save(self, step: int, state: Mapping[str, Tensor]) -> Path:
        """Write `state` as the checkpoint of `step`, rename it, then remove all but the last `keep`; its folder."""
        target = self.folder / f"{PREFIX}{step:08d}"
        part = target.with_name(target.name + UNFINISHED)
        mine = part if self.shared else part / f"rank-{self.rank}"
        if self._leads and part.exists():
            shutil.rmtree(part)
        self._barrier()
        try:
            with _without_warning():
                dcp.save(dict(state), checkpoint_id=mine, no_dist=not self.shared or self.size == 1)
        except CheckpointException as error:
            reasons = [_write_failure(one) for one, _ in error.failures.values()]
            known = [reason for reason in reasons if reason is not None]
            if not known:
                raise
            raise RunFailed(f"cannot write the checkpoint {target}: {known[0]}") from error
        self._barrier()
        self._list_checksums(mine)
        self._barrier()
        if self._leads:
            if target.exists():
                shutil.rmtree(target)
            os.replace(part, target)
            for old in whole(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        self._barrier()
        return target

    def newest(self) -> Path | None:
        """The newest finished checkpoint."""
        found = whole(self.folder)
        return found[-1] if found else None

    def newest_sound(self, say: Callable[[str], None]) -> Path | None:
        """The newest that all ranks have and in which no file has changed since it was written; None: there is none.

        Machines that share no folder may have been stopped at different moments. `say` is called with a line per
        damaged checkpoint, and where nothing can be compared. UsageError where there are checkpoints and all of them
        are damaged.
        """
        mine = [int(p.name.removeprefix(PREFIX)) for p in whole(self.folder)]
        common = set(mine).intersection(*gather_json(mine))
        for step in sorted(common, reverse=True):
            path = self.folder / f"{PREFIX}{step:08d}"
            damage = next((found for found in gather_json(self._damage(path)) if found is not None), None)
            if damage is None:
                own = path / f"rank-{self.rank}"
                if not lists_of(own if own.exists() else path):
                    say(f"{path} has no checksums, as before 0.2, or they were deleted: its files are not compared")
                return path
            say(f"{path} is damaged and is left out: {damage}")
        if common:
            raise UsageError(f"every checkpoint in {self.folder} is damaged: take another [run] out to begin anew")
        return None

    def read(self, path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors whose names `wanted` accepts, from a shared checkpoint folder or from this rank's part of it."""
        own = path / f"rank-{self.rank}"
        try:
            reader = CheckpointReader(own if own.exists() else path)
            known = reader.read_metadata().state_dict_metadata
            out = {
                name: torch.empty(about.size, dtype=about.properties.dtype)
                for name, about in known.items()
                if wanted(name) and isinstance(about, TensorStorageMetadata)
            }
            with _without_warning():
                dcp.load(out, storage_reader=reader, no_dist=True)
        except UsageError:
            raise
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            reason = str(error).strip().splitlines()  # a traceback, where torch has wrapped it
            raise UsageError(
                f"{path} is no whole checkpoint ({reason[-1] if reason else type(error).__name__}): remove it, and "
                "the one before is taken"
            ) from error
        return out

    # --- inside

    def _list_checksums(self, folder: Path) -> None:
        """Of the files that this rank has written: torch names them by rank, and the metadata is rank 0's."""
        if not self.shared or self.size == 1:
            write_checksums(folder, [file for file in folder.iterdir() if file.is_file()], 0, 1)
            return
        mine = [file for file in folder.iterdir() if file.name.startswith(f"__{self.rank}_")]
        write_checksums(folder, [*mine, *([folder / METADATA] if self.rank == 0 else [])], self.rank, self.size)

    def _damage(self, path: Path) -> str | None:
        """What this rank finds wrong. Where all ranks see the files, each checks some of them."""
        own = path / f"rank-{self.rank}"
        if own.exists():
            return find_damage(own)
        return find_damage(path, self.rank, self.size) if self.shared else find_damage(path)

    @property
    def _leads(self) -> bool:
        """One rank per folder makes, renames and removes."""
        return self.rank == 0 or (not self.shared and self.local_rank == 0)

    def _barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def _is_shared(self) -> bool:
        """Do all ranks see what rank 0 writes?"""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.size == 1:
            return True
        mark = self.folder / f".seen-{broadcast_json(os.urandom(8).hex())}"
        if self.rank == 0:
            mark.touch()
        dist.barrier()
        seen = torch.tensor([mark.exists()], dtype=torch.int64)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN)
        if self.rank == 0:
            mark.unlink()
        return bool(seen)


def _write_failure(error: BaseException) -> str | None:
    """The disk's reason, in words; None where it was not the disk.

    torch's writer of tensors finds at its end that bytes are missing, and raises that instead of the disk's error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"the disk is full or failed: {error}" if "inline_container" in str(error) else None


def renamed(state: dict[str, Tensor], name: str, other: str) -> dict[str, Tensor]:
    """What belongs to a parameter in a checkpoint, under another parameter's name."""
    own = [key for key in state if plain_name(key) == f"model/{name}" or key.startswith(f"optim/{name}/")]
    return {key.replace(name, other, 1): state[key] for key in own}
