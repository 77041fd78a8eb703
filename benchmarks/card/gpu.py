"""thinwire on a card: one script, one table a section, one JSON file.

    python3 benchmarks/card/gpu.py [--only SECTION ...] [--json PATH] [--quick]

Sections: `check` compares every Triton kernel with the reference bit for bit; `kernels` times them beside a copy, torch
eager and torch.compile; `nccl` compares codecs, memories, collectives, pipelines and the trainer on CUDA and NCCL with
the CPU; `hot` counts the host's waits for the card and its calls for memory; `pipeline` times a model of GPT2-XL's size
over links of several rates and traces it, `pipeline-rest` has more rates, `pipeline-ahead` more or fewer micro-batches
in flight, `pipeline-codecs` codecs beside the computation and in turn with it, `pipeline-each` ours at every rate,
`pipeline-fast` and `pipeline-again` rates from 300 Mbit/s on, `pipeline-jumbo` packets of 9000 bytes; `gradients` times
the mean of BERT-base-size gradients, `gradients-oktopk` Ok-Topk at eight ranks alone; `quality` fine-tunes
over compressed boundaries. From `nccl` on, several processes share the one card. Exit status 1 if anything differs.
Every section has a time limit of its own, and results are written as sections end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpu_checks
import gpu_gradients
import gpu_hot
import gpu_kernels
import gpu_nccl
import gpu_pipeline
import gpu_quality


def _check(quick: bool) -> dict[str, Any]:
    return {"differ": gpu_checks.check("cuda") + ([] if quick else gpu_checks.check_huge("cuda"))}


def _nccl(quick: bool) -> dict[str, Any]:
    rows = gpu_nccl.check("cuda", seconds=170.0)
    return {"rows": rows, "differ": [row["case"] for row in rows if row["problems"]]}


SECTIONS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "check": _check,
    "kernels": lambda quick: gpu_kernels.time_all("cuda", "select" if quick else ""),
    "nccl": _nccl,
    "hot": lambda quick: gpu_hot.measure(),
    "pipeline": lambda quick: gpu_pipeline.measure(seconds=70.0 if quick else 245.0),
    "pipeline-rest": lambda quick: gpu_pipeline.measure(seconds=175.0, cells=gpu_pipeline.REST),
    "pipeline-ahead": lambda quick: gpu_pipeline.measure(seconds=100.0, cells=gpu_pipeline.AHEAD),
    "pipeline-codecs": lambda quick: gpu_pipeline.measure(seconds=130.0, cells=gpu_pipeline.CODECS),
    "pipeline-each": lambda quick: gpu_pipeline.measure(seconds=170.0, cells=gpu_pipeline.EACH),
    "pipeline-fast": lambda quick: gpu_pipeline.measure(seconds=85.0, cells=gpu_pipeline.FAST),
    "pipeline-again": lambda quick: gpu_pipeline.measure(seconds=45.0, cells=gpu_pipeline.AGAIN),
    "pipeline-jumbo": lambda quick: gpu_pipeline.measure(seconds=120.0, cells=gpu_pipeline.JUMBO, mtu=9000),
    "gradients": lambda quick: gpu_gradients.measure(seconds=35.0, sizes=(2,)) if quick else gpu_gradients.measure(),
    "gradients-oktopk": lambda quick: gpu_gradients.measure(seconds=30.0, sizes=(8,), only="OkTopk"),
    "quality": lambda quick: gpu_quality.measure(size=gpu_quality.QUICK if quick else gpu_quality.Size()),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), help="these sections")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--quick", action="store_true", help="less of everything: does it run?")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    import triton

    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(" · ".join(report.values()))
    for section in options.only:
        start = time.time()
        try:
            report[section] = SECTIONS[section](options.quick)
        except Exception as error:  # the other sections are worth having
            report[section] = {"differ": [f"{type(error).__name__}: {error}"]}
            print(f"{section} failed: {error!r}", flush=True)
        torch.cuda.empty_cache()
        print(f"{section}: {time.time() - start:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(part.get("differ") for part in report.values() if isinstance(part, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
