"""The ways to launch kernels that gpu_tune.py times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.gpu import checksum as gpu_checksum
from thinwire.kernels.gpu import delta as gpu_delta
from thinwire.kernels.gpu import indices as gpu_indices
from thinwire.kernels.gpu import quantize as gpu_quantize
from thinwire.kernels.gpu import scatter as gpu_scatter
from thinwire.kernels.gpu import select as gpu_select
from thinwire.kernels.gpu import sign as gpu_sign
from thinwire.kernels.gpu.launch import tiling
from thinwire.kernels.gpu.order import largest as gpu_largest
from thinwire.kernels.gpu.order import radix as gpu_radix

F32, BF16 = torch.float32, torch.bfloat16
RADIX = "SIZE", "WARPS", "PROGRAMS"


class Way(NamedTuple):
    """One way to run one kernel. patches: (module, name, value)."""

    kernel: str
    how: str
    dtype: torch.dtype
    patches: tuple


def shaped(width: int, tile: int, warps: int, registers: int | None, least_rows: int = 1) -> tuple[str, Callable]:
    """(its name, a function that gives this tiling whatever it is asked for)."""

    def chosen(block: int, *_: Any) -> dict:
        return tiling(block, width, tile=tile, warps=warps, registers=registers, least_rows=least_rows)

    return f"width {width} tile {tile} warps {warps} registers {registers}", chosen


def index_add(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return out.index_add_(0, index, values)


def ways() -> Iterator[Way]:
    """The library's own first, of each kernel."""
    for dtype in (F32, BF16):
        for name, shapes in QUANTIZE.items():
            yield Way(name, "own", dtype, ())
            for shape in shapes:
                how, chosen = shaped(*shape)
                module = gpu_sign if name == "encode sign" else gpu_delta if "delta" in name else gpu_quantize
                yield Way(name, how, dtype, ((module, "encode_tiling", chosen),))
        yield Way("encode sign", "tiles in a row at any size", dtype, ((gpu_sign, "BUSY", 4),))
        alone = (gpu_sign, "EACH", 1), (gpu_sign, "encode_tiling", shaped(32, 1024, 1, 64)[1])
        yield Way("encode sign", "a tile per program", dtype, alone)
        yield Way("scatter add 1 %", "own", dtype, ())
        yield Way("scatter add 1 %", "torch's", dtype, ((gpu_select, "scatter_add", index_add),))
        for size, warps in ((128, 1), (256, 2), (512, 4), (512, 8), (1024, 4), (2048, 4)):
            patches = (gpu_scatter, "ADD", size), (gpu_scatter, "ADD_WARPS", warps)
            yield Way("scatter add 1 %", f"size {size} warps {warps}", dtype, patches)
        for name in ("histogram", "kth magnitude 1 %", "top 1 %"):
            yield Way(name, "own", dtype, ())
            if name != "histogram":
                yield Way(name, "by a sample at any size", dtype, ((gpu_select, "LARGE", 1),))
                yield Way(name, "over all values", dtype, ((gpu_select, "LARGE", 1 << 60),))
        for size, warps, programs in ((2048, 4, 1056), (4096, 8, 1056), (8192, 16, 264)):
            patches = tuple((gpu_radix, name, value) for name, value in zip(RADIX, (size, warps, programs)))
            yield Way("histogram", f"size {size} warps {warps} programs {programs}", dtype, patches)
        for size, warps in ((1024, 2), (2048, 8), (4096, 8)):
            patches = (gpu_largest, "SIZE", size), (gpu_largest, "WARPS", warps)
            yield Way("top 1 %", f"size {size} warps {warps}", dtype, patches)
    for name in ("checksum", "inspect"):
        yield Way(name, "own", torch.uint8, ())
        for rows, warps, programs in (
            (8, 4, 1056), (8, 4, 528), (4, 4, 2048), (4, 4, 1056), (2, 4, 2048), (4, 8, 1056), (2, 8, 1056),
            (8, 2, 2048), (4, 2, 2048),
        ):  # fmt: skip
            values = (("ROWS", rows), ("WARPS", warps), ("PROGRAMS", programs))
            patches = tuple((gpu_checksum, attribute, value) for attribute, value in values)
            yield Way(name, f"rows {rows} warps {warps} programs {programs}", torch.uint8, patches)
    yield Way("decode indices 1 %", "own", F32, ())
    for size, warps, registers in ((256, 2, 64), (512, 4, 64), (1024, 8, 64), (1024, 4, 96), (512, 4, None)):
        values = ("BYTES", size), ("WARPS", warps), ("REGISTERS", registers)
        patches = tuple((gpu_indices, name, value) for name, value in values)
        yield Way("decode indices 1 %", f"bytes {size} warps {warps} registers {registers}", F32, patches)


QUESTIONS = (
    "torch's", "bytes 256 warps 2 registers 64", "bytes 512 warps 4 registers 64", "bytes 1024 warps 8 registers 64",
    "size 2048 warps 8", "size 1024 warps 2", "a tile per program", "tiles in a row at any size",
    "by a sample at any size",
    "width 32 tile 1024 warps 1 registers 80", "width 32 tile 2048 warps 2 registers 64",
    "width 32 tile 1024 warps 1 registers 64",
)  # fmt: skip


def is_few(way: Way) -> bool:
    """The library's own, and what may be better."""
    return way.how == "own" or (way.how in QUESTIONS and "nearest" not in way.kernel)


WIDE = [(w, t, n, r) for w in (32, 64) for t, n, r in ((2048, 2, 64), (2048, 4, 64), (4096, 4, 64), (4096, 4, None))]
QUANTIZE = {
    "quantize 4 bits nearest": [],
    "quantize 3 bits nearest": [*WIDE, (128, 2048, 2, 64), (32, 1024, 1, 64), (32, 1024, 2, None), (32, 2048, 2, 80)],
    "quantize 4 bits stochastic": [
        *WIDE, (32, 2048, 2, 80), (32, 4096, 4, 80), (16, 2048, 2, 64), (32, 1024, 1, 80), (32, 1024, 2, 48),
        (32, 2048, 4, 48),
    ],
    "quantize 4 bits mse": [(32, 1024, 2, None), (32, 2048, 4, 64), (32, 2048, 2, None), (64, 1024, 2, None)],
    "encode sign": [*WIDE, (32, 1024, 1, 80), (32, 2048, 2, 80), (32, 1024, 2, None)],
    "encode delta 3 bits nearest": [(w, t, n, r, 8) for w, t, n, r in (*WIDE, (32, 1024, 2, 64))],
}  # fmt: skip
