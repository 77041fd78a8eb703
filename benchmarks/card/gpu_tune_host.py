"""The public calls whose time on the host gpu_tune.py measures, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, Quantize, ScaledSign, frame
from thinwire.kernels import quantize

SIZES = (1 << 20, 4 << 20, 16 << 20, 256 << 20)  # bytes of input
CODECS = {
    "4 bits": Quantize(4), "3 bits": Quantize(3), "3 bits stochastic": Quantize(3, rounding="stochastic"),
    "sign": ScaledSign(),
}  # fmt: skip


def calls(device: str = "cuda") -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes of input, call)."""
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype)[6:]
        for size in SIZES:
            x = torch.randn(size // dtype.itemsize, device=device).to(dtype)
            h = (x * 0.9).to(torch.bfloat16)
            for name, codec in CODECS.items():
                if name == "4 bits" or dtype == torch.float32:
                    yield from of_codec(f"{name} {short}", codec, x, h)
            wire = CODECS["4 bits"].encode(x)
            blocks = -(-x.numel() // 128)
            flag = partial(quantize.is_finite, wire, x.numel(), 4, blocks, dtype)
            yield f"flag from the message {short}", size, flag  # how it was found before
            sealed = torch.empty(wire.numel() + 16, dtype=torch.uint8, device=device)
            header = frame.Header(0, 1, 2, 3)
            good = torch.ones((), dtype=torch.bool, device=device)
            yield f"seal {short}", size, partial(frame.seal, header, sealed, good)
            yield f"inspect {short}", size, partial(frame.inspect, sealed, header)
        small = torch.randn(16, device=device)
        yield "torch adds 16 values", 0, lambda small=small: small + small


def of_codec(name: str, codec: Codec, x: Tensor, h: Tensor) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """A codec's calls; h: a mirror."""
    size, wire = x.numel() * x.element_size(), codec.encode(x)
    yield f"encode {name}", size, partial(codec.encode, x)
    yield f"encode_flagged {name}", size, partial(codec.encode_flagged, x)
    yield f"decode {name}", size, partial(codec.decode, wire, x.shape, x.dtype)
    if name.startswith("3 bits float"):
        yield f"encode_onto_flagged {name}", size, partial(codec.encode_onto_flagged, x, h, 0, True)


def table(rows: list[dict]) -> str:
    """Markdown: the library's own way and the best of each kernel; the host's part."""
    copy = [row["GB/s"] for row in rows if row["section"] == "copy"]
    lines = [
        f"copy {', '.join(f'{c:.0f}' for c in copy)} GB/s",
        "",
        "| kernel | dtype | own | own, from a graph | best | how |",
        "|---|---|---|---|---|---|",
    ]
    timed = [row for row in rows if row["section"] == "time" and "ms" in row]
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in timed):
        of = [r for r in timed if (r["kernel"], r["dtype"]) == (kernel, dtype)]
        share = {r["how"]: r["moved"] / r["ms"] / 1e6 / copy[-1] for r in of}
        best = max(share, key=share.__getitem__)
        graph = [r["moved"] / r["graph_ms"] / 1e6 / copy[-1] for r in of if r.get("graph_ms")]
        own = f"{share.get('own', 0):.1%} | {graph[0]:.1%}" if graph else f"{share.get('own', 0):.1%} | –"
        lines.append(f"| {kernel} | {dtype} | {own} | {share[best]:.1%} | {best} |")
    wrong = [f"{r['kernel']} {r['how']} {r['dtype']}" for r in rows if r["section"] == "equal" and not r["equal"]]
    lines += [
        "",
        "differ: " + (", ".join(wrong) or "none"),
        "",
        "| call | MiB | host µs | with wait | events |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["section"] == "host":
            numbers = " | ".join(f"{row[key]:.0f}" for key in ("MiB", "host_us", "with_wait_us", "events_us"))
            lines.append(f"| {row['call']} | {numbers} |")
    return "\n".join(lines)
