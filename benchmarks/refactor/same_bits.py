"""Does a refactoring change a single bit? Record runs with the code of before, then compare with the code of after.

PYTHONPATH=before python benchmarks/refactor/same_bits.py record FOLDER     # before: a checkout of the old code
python benchmarks/refactor/same_bits.py compare FOLDER

Three runs, seeded, each over 12 steps with a checkpoint after step 6: `thinwire train` with `max`, dp 2 × pp 2; DDP on
two ranks (`max`, and `paper-oktopk`); FSDP2 on two sites of two ranks. `compare` runs them again from the start, and
once more from the checkpoints that the old code wrote: losses, bytes and weights must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS, HALF = 12, 6
RUN = """\
[model]
hidden = 64
layers = 4
heads = 4
[data]
seq_len = 64
corpus_bytes = 40000
samples = 40
[mesh]
dp = 2
pp = 2
microbatches = 2
[optim]
batch = 8
steps = 12
warmup = 2
lr = 3e-3
[run]
eval_every = 6
checkpoint_every = 6
keep = 9
[wire]
preset = "max"
"""


def adapters(folder: str, resume_from: str | None, sharded: bool) -> dict[str, Any]:
    """One rank: a small model through compress_ddp or compress_fsdp; losses, bytes sent, a digest of the weights."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    out: dict[str, Any] = {}
    for wire in ("max", "paper-oktopk"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 8))
        if sharded:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
            for layer in (*model[::2], model):
                fully_shard(layer, mesh=mesh["shard"])
            handle = tw.parallel.compress_fsdp(model, wire, replicas=mesh["replica"])
        else:
            model = DistributedDataParallel(model)
            handle = tw.parallel.compress_ddp(model, wire)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        first = 0
        if resume_from is not None:
            first, path = HALF, f"{resume_from}/{wire}"
            weights, moments = get_state_dict(model, optimizer)
            kept = {"model": weights, "optimizer": moments}
            dcp.load(kept, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
            read = handle.read_state if sharded else tw.parallel.read_state
            handle.load_state_dict(read(path, "wire"))
        losses = []
        for step in range(first, STEPS):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(16, 32, generator=generator)
            loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step + 1 == HALF and resume_from is None:
                weights, moments = get_state_dict(model, optimizer)
                whole = {"model": weights, "optimizer": moments, "wire": handle.state_dict()}
                dcp.save(whole, checkpoint_id=f"{folder}/{wire}")
                halfway = handle.sent
        if resume_from is not None:
            halfway = 0
        local = [getattr(p, "_local_tensor", p).detach().contiguous() for p in model.parameters()]
        digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in local)).hexdigest()
        out[wire] = {"losses": losses, "second half sent": handle.sent - halfway, "weights": digest}
        handle.close()
    return out


def through_adapters(folder: Path, resume_from: Path | None) -> dict[str, Any]:
    from thinwire.lab import Network

    out = {}
    for name, hosts in (("ddp", 2), ("fsdp", 4)):
        source = None if resume_from is None else str(resume_from / name)
        with Network(hosts=hosts) as net:
            found = net.run(adapters, str(folder / name), source, name == "fsdp", timeout=200, echo=False)
        out[name] = list(found)
    return out


def trained(folder: Path, resume: bool) -> list[dict[str, Any]]:
    """Events of `thinwire train` without what a clock says; a digest of the exported model."""
    config = folder / "run.toml"
    config.write_text(RUN)
    command = [sys.executable, "-m", "thinwire", "train", str(config), "--local", "4", "--out", str(folder / "run")]
    subprocess.run([*command, *(["--resume"] if resume else [])], check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    kept = ("kind", "step", "loss", "held_out", "skips", "healed", "forward_bytes", "backward_bytes",
            "gradient_bytes", "embedding_bytes", "raw_bytes")  # fmt: skip
    out = [{name: e[name] for name in kept if name in e} for e in events if e["kind"] in ("step", "eval")]
    weights = b"".join(p.read_bytes() for p in sorted((folder / "run").rglob("*.safetensors")))
    return [*out, {"kind": "model", "sha256": hashlib.sha256(weights).hexdigest()}]


def record(folder: Path) -> None:
    folder.mkdir(parents=True)
    found = {"train": trained(folder, resume=False), **through_adapters(folder, None)}
    (folder / "found.json").write_text(json.dumps(found, indent=1))
    import thinwire

    print(f"recorded {Path(thinwire.__file__).parent} in {folder}")


def compare(folder: Path) -> int:
    import shutil
    import tempfile

    import thinwire

    before = json.loads((folder / "found.json").read_text())
    print(f"comparing {Path(thinwire.__file__).parent} with {folder}")
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        fresh, resumed = Path(temporary) / "fresh", Path(temporary) / "resumed"
        fresh.mkdir()
        now = json.loads(json.dumps({"train": trained(fresh, resume=False), **through_adapters(fresh, None)}))
        for name in before:
            wrong += _say(f"{name}, from the start", now[name] == before[name])
        resumed.mkdir()
        shutil.copytree(folder / "run", resumed / "run")
        for checkpoint in (resumed / "run").rglob(f"*{STEPS}"):  # the last one goes, the one at half stays
            if checkpoint.is_dir():
                shutil.rmtree(checkpoint)
        after = json.loads(json.dumps(trained(resumed, resume=True)))
        wrong += _say("train, from the old checkpoint", after == before["train"])
        again = json.loads(json.dumps(through_adapters(resumed, folder)))
        for name in ("ddp", "fsdp"):
            same = all(
                new[wire] == {**old[wire], "losses": old[wire]["losses"][HALF:]}
                for old, new in zip(before[name], again[name])
                for wire in old
            )
            wrong += _say(f"{name}, from the old checkpoint", same)
    return wrong


def _say(what: str, same: bool) -> int:
    print(f"{'same ' if same else 'OTHER'}  {what}", flush=True)
    return not same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    sys.exit(record(options.folder) if options.what == "record" else compare(options.folder))
