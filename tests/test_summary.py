"""`summary()`: what was sent beside what would have been, on real processes of data parallel runs and pipelines."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.distributed.summary import Summary
from thinwire.lab import Network, check

needs_lab = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
    pytest.mark.timeout(150),
]
PRELOAD = (
    "warm", "thinwire.data_parallel.ddp", "thinwire.pipeline.pipeline", "test_summary",
)  # fmt: skip
WIDTH, STEPS, MICROBATCHES, ROWS = 16, 5, 2, 8


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        (Summary(10, 118_000_000, 909_000_000), "11.80 MB per step instead of 90.90 MB: 7.7× fewer (10 steps)"),
        (Summary(1, 1000, 1010, 1), "1.00 kB per step instead of 1.01 kB: as much as without compression (1 step, 1 "
         "rolled back)"),
        (Summary(2, 4000, 2000), "2.00 kB per step instead of 1.00 kB: 2.0× more (2 steps)"),
        (Summary(3, 0, 0), "nothing sent (3 steps)"),
        (Summary(0, 0, 0), "nothing sent (0 steps)"),
    ],
)  # fmt: skip
def test_line(summary, text):
    assert str(summary) == text


# --- data parallel


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)


def backward(model: nn.Module, steps: int = STEPS, bad: int = -1) -> None:
    for step in range(steps):
        model.zero_grad()
        loss = model(torch.full((4, WIDTH), 1.0 + step + dist.get_rank())).square().mean()
        (loss * torch.nan if step == bad else loss).backward()


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def data_parallel() -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, wire in (("off", "off"), ("max", "max"), ("auto", "auto")):
        model = DDP(model_of())
        handle = tw.parallel.compress_ddp(model, wire)
        backward(model, bad=2 if name == "max" else -1)
        found[name] = handle.summary()
    handle.load_state_dict(handle.state_dict() | {f"rank{dist.get_rank()}of{dist.get_world_size()}/step": _many()})
    backward(model, 1)
    found["loaded"] = handle.summary()
    lines = Lines()
    logger = logging.getLogger("thinwire")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    handle.close()
    handle.close()
    return found | {"lines": lines.lines, "handle": handle.sent}


def _many() -> Tensor:
    return torch.tensor(1000)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    with Network(hosts=request.param, preload=PRELOAD) as net:
        return list(net.run(data_parallel, timeout=100, echo=False))


class TestDataParallel:
    pytestmark = needs_lab

    def test_bytes(self, ranks):
        size = len(ranks)
        ring = 2 * 4 * (size - 1) * sum(p.numel() for p in model_of().parameters()) // size
        for found in ranks:
            for name in ("off", "max", "auto"):
                assert (found[name].steps, found[name].would_have_sent // STEPS) == (STEPS, ring), name
            assert found["off"].ratio == pytest.approx(1, abs=0.01) and found["off"].skips == 0
            assert found["max"].ratio > 2 and found["max"].skips == 1
            assert found["auto"].ratio == pytest.approx(1, abs=0.01)  # its first steps are exact, by DDP's own way

    def test_loaded_steps_are_not_counted(self, ranks):
        for found in ranks:
            assert found["loaded"].steps == STEPS + 1
            assert found["loaded"].sent == found["handle"] > found["auto"].sent

    def test_one_line_at_the_end_on_the_first_rank(self, ranks):
        assert ranks[0]["lines"] == [f"thinwire: {ranks[0]['loaded']}"]
        assert all(found["lines"] == [] for found in ranks[1:])


# --- pipelines


class Masked(nn.Module):
    """A stage that passes a mask and positions along with its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *beside: Tensor) -> Any:
        out = self.inner(x)
        if beside:  # the last stage
            return out * beside[0].unsqueeze(-1)
        return out, x[:, 0] > 0, torch.arange(len(x))


def pipeline(wire: str) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = tw.parallel.CompressedStage(Masked(), rank, size, torch.device("cpu"), wire=wire)
    before = stage.summary()
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    for _ in range(STEPS):
        with stage.step(ids=list(range(ROWS))):
            x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
            schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == size - 1 else {}))
    return {"before": before, "after": stage.summary(), "pipe": stage.pipeline.summary()}


class TestPipeline:
    pytestmark = needs_lab

    @pytest.mark.parametrize("wire", ["off", "safe"])
    def test_bytes(self, wire):
        """Per step: the activation as frames, the mask and the positions as they are; backward the gradient alone."""
        with Network(hosts=2, preload=PRELOAD) as net:
            first, last = net.run(pipeline, wire, timeout=100, echo=False)
        for found in (first, last):
            assert found["before"] == Summary(0, 0, 0) and found["after"] == found["pipe"]
            assert found["after"].steps == STEPS
        activation, beside, header = 4 * ROWS * WIDTH, ROWS * (1 + 8), 16 * MICROBATCHES
        assert first["after"].would_have_sent == STEPS * (activation + beside)
        assert last["after"].would_have_sent == STEPS * activation
        if wire == "off":
            assert first["after"].sent == STEPS * (activation + beside + header)
        else:
            assert first["after"].sent == last["after"].sent + STEPS * beside
            assert last["after"].ratio > 2
