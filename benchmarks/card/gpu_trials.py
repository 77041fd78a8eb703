"""Things that users may combine with compression: each works, or is refused in one line.

    python3 benchmarks/card/gpu_trials.py --out FOLDER [--only NAME ...] [--quick] [--table]

Two ranks on one card over NCCL; --quick: on the CPU over Gloo, without the trials that need a card. A trial trains a
small model for a few steps and compares the replicas' weights. A line of FOLDER/trials.jsonl per trial, written at
once; trials that are there are not made again. "works" and "refused" (a UsageError of one line) are fine; "fails" is
not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from thinwire.codecs import Quantize
from thinwire.data_parallel.ddp import compress_ddp
from thinwire.data_parallel.fsdp import compress_fsdp
from thinwire.errors import UsageError
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.stage import CompressedStage

WIDTH, STEPS, RANKS, LIMIT = 256, 4, 2, 90.0


def model_of(dtype: torch.dtype = torch.float32, device: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device, dtype)


def train(model: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Some steps; the weights must change, stay finite, and be the same on all ranks."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.1)
    before = [p.detach().clone() for p in trained]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=generator).to(device, dtype)
        model(x).float().square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    assert all(bool(whole(p).isfinite().all()) for p in trained), "weights are not finite"
    assert any(not torch.equal(whole(a), whole(b)) for a, b in zip(before, trained)), "weights did not change"
    for p in trained:
        mine = whole(p).to(device, torch.float32)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        assert all(torch.equal(other, mine) for other in others), "replicas differ"


def whole(p: Tensor) -> Tensor:
    return (p.to_local() if hasattr(p, "to_local") else p).detach().contiguous()


def ddp_bf16(device: torch.device) -> None:
    model = DistributedDataParallel(model_of(torch.bfloat16, device))
    compress_ddp(model, "max")
    train(model, device, torch.bfloat16)


def ddp_fp8_frozen(device: torch.device) -> None:
    """Frozen weights in 8 bits as buffers, trained ones in bfloat16."""

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("base", torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn))
            self.adapter = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.base.to(torch.bfloat16) * 0.01 + self.adapter(x)

    torch.manual_seed(0)
    model = DistributedDataParallel(Base().to(device), broadcast_buffers=False)
    compress_ddp(model, "max")
    train(model, device, torch.bfloat16)


def ddp_fp8_trained(device: torch.device) -> None:
    """Parameters of 8 bits that train."""
    model = model_of(torch.bfloat16, device)
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn))
    ddp = DistributedDataParallel(model, init_sync=False)
    compress_ddp(ddp, "max")


def ddp_of_compiled(device: torch.device) -> None:
    model = DistributedDataParallel(torch.compile(model_of(device=device)))
    compress_ddp(model, "max")
    train(model, device)


def compiled_ddp(device: torch.device) -> None:
    """Compressed, then compiled."""
    model = DistributedDataParallel(model_of(device=device))
    compress_ddp(model, "max")
    train(torch.compile(model), device)


def compiled_ddp_given(device: torch.device) -> None:
    """Compiled, then compressed."""
    compress_ddp(torch.compile(DistributedDataParallel(model_of(device=device))), "max")


def sharded(device: torch.device, **policies: Any) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard"))
    model = model_of(device=device)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["shard"], **policies)
    compress_fsdp(model, "max", replicas=mesh["replica"])
    return model


def fsdp_bf16(device: torch.device) -> None:
    train(sharded(device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), device)


def fsdp_offload(device: torch.device) -> None:
    train(sharded(device, offload_policy=CPUOffloadPolicy()), device)


def fsdp_compiled(device: torch.device) -> None:
    model = sharded(device)
    model.compile()
    train(model, device)


def piped(device: torch.device, compiled: bool, dtype: torch.dtype) -> None:
    """Two stages in 1F1B under `max`; the loss of the last one must fall."""
    rank, last = dist.get_rank(), dist.get_rank() == RANKS - 1
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device, dtype)
    stage = CompressedStage(torch.compile(part) if compiled else part, rank, RANKS, device, wire="max")
    pipe = Pipeline([stage])
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, target: (y.float() - target).square().mean())
    optimiser = torch.optim.SGD(part.parameters(), lr=0.5)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = []
    for _ in range(2 * STEPS):
        losses: list[Tensor] = []
        with pipe.step(ids=list(range(8)) if rank == 0 else None):
            target = {"target": x.float().tanh(), "losses": losses} if last else {}
            schedule.step(*(x,) if rank == 0 else (), **target)
        assert not pipe.skipped, "a step was rolled back"
        optimiser.step()
        optimiser.zero_grad()
        found.append(sum(float(loss.detach()) for loss in losses))
    assert not last or found[-1] < found[0], f"losses {found}"


def compiled_stage(device: torch.device) -> None:
    piped(device, True, torch.float32)


def bf16_stage(device: torch.device) -> None:
    piped(device, False, torch.bfloat16)


def codec_in_graph(device: torch.device) -> None:
    """A message encoded and decoded in a graph of the user's: replays see new values, and the flag says of each whether
    it was finite."""
    codec, x = Quantize(4), torch.randn(1 << 16, device=device)
    codec.decode(codec.encode_flagged(x)[0], x.shape, x.dtype)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wire, finite = codec.encode_flagged(x)
        back = codec.decode(wire, x.shape, x.dtype)
    for value in (1.0, float("nan"), 2.0):
        x.normal_()
        x[5] = value
        graph.replay()
        assert bool(finite) == (value == value), "the flag is not that of the replay"
        if bool(finite):
            assert torch.equal(back, codec.decode(codec.encode(x), x.shape, x.dtype)), "other values than outside"


def backward_in_graph(device: torch.device) -> None:
    """A step with its exchange in a graph of the user's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(model_of(device=device))
        compress_ddp(model, "max")
        for _ in range(3):  # torch wants 11 backward passes of DDP before a capture: its first ones read the clock
            train(model, device)
    torch.cuda.synchronize()
    x = torch.randn(8, WIDTH, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x).square().mean().backward()


TRIALS: dict[str, Callable[[torch.device], None]] = {
    "DDP, a bf16 model": ddp_bf16, "DDP, a frozen fp8 base": ddp_fp8_frozen, "DDP, fp8 parameters": ddp_fp8_trained,
    "DDP of a compiled model": ddp_of_compiled, "DDP compressed, then compiled": compiled_ddp,
    "DDP compiled, then compressed": compiled_ddp_given, "FSDP2, bf16 policy": fsdp_bf16,
    "FSDP2, CPU offload": fsdp_offload, "FSDP2, compiled": fsdp_compiled, "a compiled stage": compiled_stage,
    "a stage in bf16": bf16_stage,
}  # fmt: skip
CARD = {"a codec in a CUDA graph": codec_in_graph, "an exchange in a CUDA graph": backward_in_graph}


def one_trial(tell: Callable[[Any], None], device_name: str, name: str) -> None:
    device = gpu_ranks.join(device_name, seconds=LIMIT)
    try:
        (TRIALS | CARD)[name](device)
        tell(("works", ""))
    except UsageError as error:
        tell(("refused" if "\n" not in str(error) else "fails", str(error)))
    except BaseException as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        refused = "UsageError" in traceback.format_exc()
        tell(("refused" if refused else "fails", f"{type(error).__name__}: {line}"[:300]))


def attempt(device: str, name: str) -> dict[str, Any]:
    said = []
    for _, what in gpu_ranks.launch(one_trial, RANKS, device, name, seconds=LIMIT):
        said.append(("fails", str(what)[-300:]) if isinstance(what, gpu_ranks.Failure) else what)
    worst = max(said, key=lambda pair: ("works", "refused", "fails").index(pair[0]), default=("fails", "no answer"))
    return {"trial": name, "device": device, "verdict": worst[0], "text": worst[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--parallel", type=int, default=1, help="trials side by side")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path, device = options.out / "trials.jsonl", "cpu" if options.quick else "cuda"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if options.table:
        print("\n".join(f"| {r['trial']} | {r['device']} | {r['verdict']} | {r['text']} |" for r in rows))
        return 0
    done = {(row["trial"], row["device"]) for row in rows}
    wanted = [name for name in (TRIALS if options.quick else TRIALS | CARD) if (name, device) not in done]
    wanted = [name for name in wanted if not options.only or any(text in name for text in options.only)]
    with ThreadPoolExecutor(options.parallel) as pool:
        for row in pool.map(lambda name: attempt(device, name), wanted):
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
