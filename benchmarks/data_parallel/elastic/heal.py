"""A newcomer takes a state of weights and moments over a slow link: thinwire's transport beside torchft's own (HTTP).

    python benchmarks/data_parallel/elastic/heal.py [--width 2000] [--rate 50mbit]
    python benchmarks/data_parallel/elastic/heal.py --save state.pt [--device cuda]     # 135 million parameters
    python benchmarks/data_parallel/elastic/heal.py --state state.pt --kind thinwire    # then, or torchft
    python benchmarks/data_parallel/elastic/heal.py --apart state.pt                    # bytes as differences

The state is that of a model that has trained for `--steps` steps with Adam: what packing gains depends on it. `--save`
trains a language model of SmolLM2-135M's shapes on this project's documentation, and keeps its state, and that of 1, 10
and 30 steps before. Printed as one line of JSON: seconds and the bytes that crossed the link, of each, and both
computed for 135 million parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from member import NextByte, batch, text

from thinwire.elastic.healing import Healing
from thinwire.elastic.packing import nbytes, pack
from thinwire.elastic.require import require_torchft
from thinwire.lab import Network

LARGE = 135e6  # parameters
PATIENCE = 600.0


def trained(width: int, steps: int) -> dict[str, Any]:
    """A state that is not random."""
    torch.manual_seed(0)
    model = NextByte(width)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data, g = text()[0], torch.Generator().manual_seed(0)
    for _ in range(steps):
        x, y = batch(data, g, 64)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def large(steps: int, device: str, path: Path) -> dict[str, Any]:
    """A model of SmolLM2-135M's shapes, trained on bytes of the documentation, each as one of many tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, weight_decay=0.1)
    data, g = text()[0], torch.Generator().manual_seed(0)
    pairs = (data[:-1] * 256 + data[1:])[::2] % 49152  # two bytes are a token
    saved = {}
    for step in range(1, steps + 1):
        starts = torch.randint(len(pairs) - 129, (8,), generator=g)
        x = torch.stack([pairs[start : start + 128] for start in starts]).to(device)
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if steps - step in (0, 1, 10, 30):
            saved[f"{steps - step} before"] = _flat(model, optimizer)
    torch.save(saved, path)
    return {"parameters": sum(p.numel() for p in model.parameters()), "steps": steps, "device": device}


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and both moments by name, on the host."""
    out = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        out |= {f"{name} {field}": optimizer.state[p][field].cpu().clone() for field in ("exp_avg", "exp_avg_sq")}
    return out


def kept(path: str) -> dict[str, Any]:
    """The last state that `large` has kept."""
    flat = torch.load(path, weights_only=True)["0 before"]
    moments = {name: x for name, x in flat.items() if " " in name}
    return {"model": {name: x for name, x in flat.items() if name not in moments}, "optimizer": moments}


def apart(path: Path) -> dict[str, Any]:
    """What is left of a state's bytes when it is packed: the whole, and XORed with the state of some steps before."""
    saved = torch.load(path, weights_only=True)
    now = saved["0 before"]
    out: dict[str, Any] = {"state_bytes": nbytes(now)}
    for name, then in saved.items():
        whole = name == "0 before"
        found = {k: x if whole else (x.view(torch.int32) ^ then[k].view(torch.int32)) for k, x in now.items()}
        began = time.monotonic()
        packed = sum(piece.nbytes for piece in pack(found))
        out["whole" if whole else name] = {"share": packed / nbytes(now), "seconds": time.monotonic() - began}
    return out


def transport(kind: str, host: str) -> Any:
    if kind == "thinwire":
        return Healing(host, PATIENCE, lambda: 1 << 40)
    require_torchft()
    from torchft.checkpointing import HTTPTransport

    return HTTPTransport(timeout=timedelta(seconds=PATIENCE), num_chunks=0)


def exchange(
    folder: str, kind: str, addresses: list[str], width: int, steps: int, saved: str | None
) -> dict[str, float]:  # fmt: skip
    """On the first host a member, on the second a newcomer."""
    torch.set_num_threads(1)
    host = addresses[int(os.environ["RANK"])]
    home, limit = Path(folder), timedelta(seconds=PATIENCE)
    place = home / f"{kind}.json"
    if os.environ["RANK"] == "0":
        state = trained(width, steps) if saved is None else kept(saved)
        one = transport(kind, host)
        began = time.monotonic()
        one.send_checkpoint([1], 7, state, limit)
        ready = time.monotonic() - began
        place.with_suffix(".part").write_text(json.dumps(one.metadata()))
        os.replace(place.with_suffix(".part"), place)
        while not (home / f"{kind}.done").exists():
            time.sleep(0.05)
        one.disallow_checkpoint()
        one.shutdown(wait=False)
        return {"packing_seconds": ready, "state_bytes": nbytes(state), "parameters": nbytes(state["model"]) // 4}
    one = transport(kind, host)
    while not place.exists():
        time.sleep(0.05)
    began = time.monotonic()
    one.recv_checkpoint(0, json.loads(place.read_text()), 7, limit)
    seconds = time.monotonic() - began
    (home / f"{kind}.done").touch()
    one.shutdown(wait=False)
    return {"seconds": seconds}


def measure(kind: str, width: int, steps: int, rate: str, saved: str | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, Network(hosts=2, rate=rate) as net:
        first, second = net.run(
            exchange,
            folder,
            kind,
            [str(host.address) for host in net.hosts],
            width,
            steps,
            saved,
            echo=False,
            timeout=PATIENCE,
        )
        crossed = net.traffic()["host0"].sent
    scale = LARGE / first["parameters"]
    found = first | second | {"bytes": crossed}
    return found | {f"{key}_of_135M": found[key] * scale for key in ("seconds", "bytes", "packing_seconds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2000, help="of the model: 2000 is 4.6 million parameters")
    parser.add_argument("--steps", type=int, default=60, help="of training before")
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--save", type=Path, help="train a model of 135 million parameters, and keep its states there")
    parser.add_argument("--device", default="cpu", help="with --save")
    parser.add_argument("--state", type=Path, help="that --save has kept, instead of a small model's")
    parser.add_argument("--kind", choices=("thinwire", "torchft"), help="one alone")
    parser.add_argument("--apart", type=Path, help="of states that --save has kept: their sizes as differences")
    options = parser.parse_args()
    if options.save or options.apart:
        about = large(options.steps, options.device, options.save) if options.save else apart(options.apart)
        print(json.dumps({"kind": "saved" if options.save else "apart", **about}), flush=True)
        return
    given = (options.width, options.steps, options.rate, None if options.state is None else str(options.state))
    kinds = ("thinwire", "torchft") if options.kind is None else (options.kind,)
    found = {kind: measure(kind, *given) for kind in kinds}
    print(json.dumps({"kind": "heal", "rate": options.rate, **found}), flush=True)


if __name__ == "__main__":
    main()
