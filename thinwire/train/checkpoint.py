"""Checkpoints by torch.distributed.checkpoint: flat names, whole or not at all, the last K kept.

    out/checkpoints/step-00000100/      one folder, where all ranks see it
    out/checkpoints/step-00000100/rank-3/    one a rank, where machines share no folder

Names that all replicas have alike (model/…, optim/…) are stored once; what is a rank's own has its rank in the name.
A folder is written under another name and renamed when every rank is done, so what has its name is whole.
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

from thinwire.errors import UsageError

CHECKPOINTS, PREFIX, UNFINISHED = "checkpoints", "step-", ".part"


@contextmanager
def _meant() -> Iterator[None]:
    """torch warns wherever `no_dist` is set; here it is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def whole(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    found = folder.glob(f"{PREFIX}*") if folder.exists() else ()
    return sorted(p for p in found if p.name.removeprefix(PREFIX).isdigit())


def refuse_second_run(out: Path, resume: bool) -> None:
    found = whole(out / CHECKPOINTS)
    if found and not resume:
        step = int(found[-1].name.removeprefix(PREFIX))
        raise UsageError(f"{out} holds a run already (step {step}): use --resume, or another [run] out")


class Checkpoints:
    """The checkpoints of one run. Every method but `newest` is called by all ranks together."""

    def __init__(self, folder: str | Path, keep: int = 2, local_rank: int = 0) -> None:
        self.folder, self.keep, self.local_rank = Path(folder), keep, local_rank
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.shared = self._is_shared()

    def save(self, step: int, state: Mapping[str, Tensor]) -> Path:
        """Write, rename, then remove what is older than the last `keep`."""
        target = self.folder / f"{PREFIX}{step:08d}"
        part = target.with_name(target.name + UNFINISHED)
        mine = part if self.shared else part / f"rank-{self.rank}"
        if self._leads and part.exists():
            shutil.rmtree(part)
        self._barrier()
        with _meant():
            dcp.save(dict(state), checkpoint_id=mine, no_dist=not self.shared or self.size == 1)
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
        """The last whole one."""
        found = whole(self.folder)
        return found[-1] if found else None

    def agreed_newest(self) -> Path | None:
        """The newest that all ranks have: machines that share no folder may have been stopped at different moments."""
        mine = [int(p.name.removeprefix(PREFIX)) for p in whole(self.folder)]
        everyone: list[list[int]] = [mine]
        if self.size > 1:
            everyone = [[] for _ in range(self.size)]
            dist.all_gather_object(everyone, mine)
        common = set(mine).intersection(*everyone)
        return self.folder / f"{PREFIX}{max(common):08d}" if common else None

    def read(self, path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors whose names are wanted, from one folder or from this rank's."""
        own = path / f"rank-{self.rank}"
        try:
            reader = dcp.FileSystemReader(own if own.exists() else path)
            known = reader.read_metadata().state_dict_metadata
            out = {
                name: torch.empty(about.size, dtype=about.properties.dtype)
                for name, about in known.items()
                if wanted(name) and isinstance(about, TensorStorageMetadata)
            }
            with _meant():
                dcp.load(out, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            reason = str(error).strip().splitlines()  # a traceback, where torch has wrapped it
            raise UsageError(
                f"{path} is no whole checkpoint ({reason[-1] if reason else type(error).__name__}): remove it, and "
                "the one before is taken"
            ) from error
        return out

    # --- inside

    @property
    def _leads(self) -> bool:
        """One rank a folder makes, renames and removes."""
        return self.rank == 0 or (not self.shared and self.local_rank == 0)

    def _barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def _is_shared(self) -> bool:
        """Do all ranks see what rank 0 writes?"""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.size == 1:
            return True
        token = [os.urandom(8).hex() if self.rank == 0 else ""]
        dist.broadcast_object_list(token)
        mark = self.folder / f".seen-{token[0]}"
        if self.rank == 0:
            mark.touch()
        dist.barrier()
        seen = torch.tensor([mark.exists()], dtype=torch.int64)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN)
        if self.rank == 0:
            mark.unlink()
        return bool(seen)
