"""thinwire on a card: one script, one table a section, one JSON file.

    python3 benchmarks/gpu.py [--only SECTION ...] [--json PATH]

Sections: `check` compares every Triton kernel with the reference bit for bit; `kernels` times them beside a copy,
torch eager and torch.compile. Needs torch, triton and numpy only. Exit status 1 if a kernel differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_checks
import gpu_kernels

SECTIONS = {
    "check": lambda: {"differ": gpu_checks.check("cuda") + gpu_checks.check_huge("cuda")},
    "kernels": lambda: gpu_kernels.time_all("cuda"),
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), help="these sections")
    parser.add_argument("--json", type=Path, help="write the results there")
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
        report[section] = SECTIONS[section]()
        torch.cuda.empty_cache()
        print(f"{section}: {time.time() - start:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report.get("check", {}).get("differ") else 0


if __name__ == "__main__":
    sys.exit(main())
