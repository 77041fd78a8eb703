"""torchft's DiLoCo beside ours: one model, one data, one link; held-out loss, bytes that left a site, seconds.

    pip install torchft
    python benchmarks/quality/torchft_diloco.py [--rate 20mbit] [--latency 25ms] [--json PATH]

Two sites of one process each, on hosts of the lab. torchft 0.2 averages the outer gradient in fp32 over Gloo (its eight
bits are for GPUs), after asking its lighthouse for a quorum. DiLoCo is the same algorithm in both, so their losses must
agree. Bytes are what the lab counted on the site's line, headers and torchft's heartbeats included. Seconds are of the
training steps, without start and evaluation.
"""

from __future__ import annotations

import argparse
import os
import socket
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stacked_model import Decoder, Size, pack, read_corpus, sequences, starts
from stacked_run import Job
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from thinwire.lab import Network
from thinwire.lab.topology import in_sites, make_link
from thinwire.quantities import show_bytes
from thinwire.terminal import table, write_json

PORT = 29700  # of torchft's lighthouse
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
METHODS: dict[str, dict[str, Any] | None] = {
    "torchft DiLoCo": None,
    "thinwire diloco": {"preset": "diloco"},
    "thinwire streaming-diloco": {"preset": "streaming-diloco"},
    "thinwire sparseloco": {"preset": "sparseloco"},
    "thinwire local-max": {"preset": "local-max"},
}


def site(job: Job, corpus: str) -> tuple[float, float]:
    """One site: (held-out loss, seconds of the steps). corpus: a file that `pack` wrote."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    text, held = read_corpus(Path(corpus))
    model = Decoder(job.size, job.seed)
    inner = AdamW(model.parameters(), lr=job.lr, weight_decay=0.1)
    begin_at = starts(text, 1, job.steps, job.sites, job.batch // job.sites, apart=False)[:, rank]
    dist.init_process_group("gloo")
    begin = _torchft if METHODS[job.method] is None else _thinwire
    context, after, finish = begin(job, model, inner, rank)
    with context:
        dist.barrier()
        began = time.perf_counter()
        for step in range(job.steps):
            inner.zero_grad()
            model(sequences(text, begin_at[step], job.size.length)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.param_groups[0]["lr"] = job.rate(step)
            inner.step()
            after()
        finish()
        seconds = time.perf_counter() - began
    with torch.no_grad():
        places = torch.linspace(0, held.numel() - job.size.length - 2, 256).long()
        loss = float(model(sequences(held, places, job.size.length)))
    dist.barrier()
    return loss, seconds


Begun = tuple[AbstractContextManager[Any], Callable[[], object], Callable[[], None]]


def _thinwire(job: Job, model: nn.Module, inner: Optimizer, rank: int) -> Begun:
    from thinwire.parallel import LocalSteps

    settings = METHODS[job.method]
    assert settings is not None
    local = LocalSteps(model.named_parameters(), inner, {**settings, "every": job.every})
    return nullcontext(), local.step, local.finish


def _torchft(job: Job, model: nn.Module, inner: Optimizer, rank: int) -> Begun:
    """Its DiLoCo averages in a hook of the inner optimiser; steps are a multiple of H, so it ends with an average."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    first = os.environ["MASTER_ADDR"]
    own = _own_address(first)
    server = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=job.sites) if rank == 0 else None
    dist.barrier()
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=120)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=lambda state: None, state_dict=dict,
        min_replica_size=job.sites, use_async_quorum=False, rank=0, world_size=1, store_addr=own, store_port=store.port,
        lighthouse_addr=f"http://{first}:{PORT}", replica_id=f"site{rank}", hostname=own, init_sync=False,
        timeout=limit, quorum_timeout=limit,
    )  # fmt: skip
    diloco = DiLoCo(
        manager, [model], inner, SGD(model.parameters(), **OUTER), job.every, use_bucketization=True, bucket_cap_mb=64
    )

    def finish() -> None:
        assert manager.current_step() == job.steps // job.every, "a round of torchft's was not committed"
        dist.barrier()
        manager.shutdown(wait=False)
        if server is not None:
            server.shutdown()
        assert store.port  # it serves as long as somebody holds it

    return diloco, lambda: None, finish


def _own_address(other: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 1))
        return str(probe.getsockname()[0])


def measure(job: Job, link: dict[str, Any], corpus: str) -> dict[str, Any]:
    """One method on a network of its own."""
    with Network(topology=in_sites(job.sites, 1, make_link(link, "")), preload=("torch",)) as net:
        results = net.run(site, job, corpus, timeout=600.0, echo=False)
    sent = max(max(traffic.sent, traffic.received) for name, traffic in results.traffic.items() if "-" not in name)
    return {
        "method": job.method, "every": job.every, "loss": results[0][0], "seconds": results[0][1], "bytes": sent,
        "losses": [loss for loss, _ in results],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="20mbit", help="of each site's line (default 20mbit)")
    parser.add_argument("--latency", default="25ms", help="one way (default 25ms)")
    parser.add_argument("--steps", type=int, default=500, help="a multiple of --every (default 500)")
    parser.add_argument("--every", type=int, default=10, help="steps between two averages (default 10)")
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--corpus", help="a file that local_frontier.py --pack wrote; by default Python's own library")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    if args.corpus is None:
        args.corpus = os.path.join(tempfile.mkdtemp(), "library.xz")
        pack([Path(sysconfig.get_paths()["stdlib"])], Path(args.corpus), 4_000_000)
    rows = []
    for method in args.only:
        size = Size(width=128, layers=2, length=64)
        job = Job(method, 2, args.every, 0, args.steps, 3e-3, batch=16, size=size)
        rows.append(measure(job, {"rate": args.rate, "latency": args.latency}, args.corpus))
        print(f"{method}: held-out loss {rows[-1]['loss']:.4f}, {rows[-1]['seconds']:.1f} s", flush=True)
    cells = [(r["method"], f"{r['loss']:.4f}", show_bytes(r["bytes"]), f"{r['seconds']:.1f} s") for r in rows]
    title = f"Two sites, {args.rate}, {args.latency} one way, H = {args.every}, {args.steps} steps"
    table(title, ("method", "held-out loss", "through a site's line", "training"), cells)
    write_json(args.json, {"rate": args.rate, "latency": args.latency, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
