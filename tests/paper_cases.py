"""The presets `paper-…` against straight-line code of the papers' algorithms, with all their defaults on.

Every rank computes the whole reference by itself: workers, boundaries and all. A case fails when a default of a preset,
or of what it names, is not the published one any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from pipeline_support import Data, Run, gathered
from rank_cases import check, check_equal
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives.thresholds import FINE_SHIFT
from thinwire.data_parallel.frozen_adam import FrozenAdam

BLOCK = 128  # values of a scale: one sample's activation here
STEPS_PER_EPOCH = 2


def layer(index: int, width: int = BLOCK) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(50 + index)
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Samples(Data):
    """Twelve vectors, six per step."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.x = torch.randn(12, BLOCK, generator=g)
        self.y = torch.tanh(self.x.roll(1, dims=1))
        self.samples, self.rows = 12, 12 // STEPS_PER_EPOCH


# --- AQ-SGD


def rounded(x: Tensor, bits: int) -> Tensor:
    """The authors' quantiser: integers −2^(b−1) … 2^(b−1) − 1 of max|x|/2^(b−1), with a scale per block."""
    flat = nn.functional.pad(x.reshape(-1), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    mantissa, exponent = torch.frexp(flat.abs().amax(1, keepdim=True) / 2 ** (bits - 1))
    step = torch.ldexp(torch.ceil(mantissa * 128) / 128, exponent)
    codes = torch.round(torch.where(step > 0, flat / step, 0)).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes * step).reshape(-1)[: x.numel()].view_as(x)


def aqsgd_is_the_published_algorithm(authors: bool) -> None:
    """Four steps of three stages. authors: the first epoch is exact backward too, as in their code; else as in the
    paper's algorithm, where a first visit is full in forward only."""
    wire = tw.Wire.of("paper-aqsgd").with_epoch(STEPS_PER_EPOCH)
    if not authors:
        wire = tw.Wire.of({"preset": "paper-aqsgd", "backward": {"codec": "quantize", "bits": 8, "scale": "full"}})
    run, data = Run("1F1B", 3, wire, make=layer), Samples()
    layers = [layer(index) for index in range(3)]
    buffers: list[dict[int, Tensor]] = [{}, {}]
    batches = [one for epoch in range(3) for one in data.epoch(epoch)]
    for number, (ids, drawn, y) in enumerate(batches):
        x = -drawn if number == 4 else drawn  # changes larger than values, which a gate would see
        run.step(x, y, ids, update=True)
        for module in layers:
            module.zero_grad()
        for part in torch.arange(len(ids)).tensor_split(3):
            value, sent = x[part], []
            for boundary, memory in enumerate(buffers):
                a = layers[boundary](value)
                for row, place in enumerate(part.tolist()):
                    m = memory.get(ids[place])
                    memory[ids[place]] = a[row].detach() if m is None else m + rounded(a[row].detach() - m, 4)
                value = torch.stack([memory[ids[place]] for place in part.tolist()]).requires_grad_()
                sent.append((a, value))
            nn.functional.mse_loss(layers[2](value), y[part]).backward()
            for a, arrived in reversed(sent):
                exact = authors and number < STEPS_PER_EPOCH
                a.backward(arrived.grad if exact else rounded(arrived.grad, 8))
        with torch.no_grad():
            for p in (p for module in layers for p in module.parameters()):
                p -= 0.05 * p.grad / 3
    mine = dist.get_rank()
    ours = dict(run.stages[0].submod.named_parameters())
    check_equal(f"stage {mine}", ours, dict(layers[mine].named_parameters()), 1e-7, relative=1e-6)
    check(run.pipe.stats.skips == 0, f"{run.pipe.stats.skips} steps were skipped")


def aqsgd_survives_a_resume_in_its_first_epoch() -> None:
    """A training step and an evaluation, then a new pipeline from its state: the epoch ends where it would have."""
    wire = tw.Wire.of("paper-aqsgd").with_epoch(STEPS_PER_EPOCH)
    data = Samples()
    batches = [one for epoch in range(2) for one in data.epoch(epoch)]
    whole, first = Run("1F1B", 3, wire, make=layer), Run("1F1B", 3, wire, make=layer)
    for ids, x, y in batches:
        whole.step(x, y, ids)
    first.step(*batches[0][1:], batches[0][0])
    first.eval(*batches[0][1:])
    second = Run("1F1B", 3, wire, make=layer)
    second.pipe.load_state_dict(first.pipe.state_dict())
    for number, (ids, x, y) in enumerate(batches[1:], 1):
        second.step(x, y, ids)
        exact = all(not lane.coded[0].stats.messages for lane in second.pipe.lanes() if "backward" in lane.name)
        check(exact == (number < STEPS_PER_EPOCH), f"step {number}: backward is {'exact' if exact else 'coded'}")
    check_equal("resumed", second.gradients(), whole.gradients())


def aqsgd_between_replicas_is_frozen_adam() -> None:
    """Two exact steps of AdamW, then a frozen variance and the momentum in four bits, error feedback on both hops.

    Two things are ours: the owner repays its hop's error through its own first hop; the frozen variance has a floor.
    """
    ranks, (beta1, beta2), lr, eps, floor = dist.get_world_size(), (0.9, 0.999), 1e-2, 1e-8, 1e-3
    shapes, chunk = {"w": (5, BLOCK), "b": (300,)}, 3 * BLOCK  # a third of them in whole blocks
    named = {name: nn.Parameter(_noise(len(shape), *shape)) for name, shape in shapes.items()}
    adam = FrozenAdam(named.items(), lr, weight_decay=0.0, wire="paper-aqsgd", freeze_after=STEPS_PER_EPOCH)
    x = _flat(named)
    m = torch.zeros_like(x)
    v = torch.zeros_like(x)
    errors = [torch.zeros_like(x) for _ in range(ranks)]
    for t in range(1, 7):
        drawn = [{name: _noise(10 * t + r, *shape) for name, shape in shapes.items()} for r in range(ranks)]
        for name, p in named.items():
            p.grad = drawn[dist.get_rank()][name].clone()
        adam.step()
        gradients = [_flat(one) for one in drawn]
        if t <= STEPS_PER_EPOCH:
            mean = sum(gradients) / ranks
            m = beta1 * m + (1 - beta1) * mean
            v = beta2 * v + (1 - beta2) * mean**2
            seen = v / (1 - beta2**t)
        else:
            outgoing = [beta1 * m + (1 - beta1) * g + e for g, e in zip(gradients, errors)]
            first = [rounded(one, 4) for one in outgoing]
            mean = sum(first) / ranks
            m = torch.cat([rounded(one, 4) for one in mean.split(chunk)])  # each chunk has an owner: the second hop
            errors = [one - sent for one, sent in zip(outgoing, first)]
            for owner, place in enumerate(torch.arange(x.numel()).split(chunk)):
                errors[owner][place] += ranks * (mean - m)[place]
            held = (v / (1 - beta2**STEPS_PER_EPOCH)).split([5 * BLOCK, 300])
            seen = torch.cat([one.clamp(min=floor * float(one.mean())) for one in held])
        x = x - lr * m / (1 - beta1**t) / (seen.sqrt() + eps)
        check_equal(f"step {t}", {"x": _flat(named)}, {"x": x}, 2e-6, relative=0.0)
    check(adam.frozen, "the variance was never frozen")


# --- Ok-Topk


def oktopk_is_the_published_algorithm() -> None:
    """Past the second re-estimation of thresholds: one sparse vector of all parameters, which accumulates lr·G.

    The sums' threshold is found in histograms, to a part in 8,192; the nudge is the largest of the authors' code."""
    ranks, density, tau_prime, nudge = dist.get_world_size(), 0.01, 128, 1.036
    shapes = {"w": (40, 40), "b": (200,)}
    named = {name: nn.Parameter(_noise(len(shape), *shape)) for name, shape in shapes.items()}
    lr = 0.5
    reducer = tw.parallel.Reducer(named.items(), "paper-oktopk", scale=lambda: 1 / lr)
    x = _flat(named)
    k = math.ceil(density * x.numel())
    residuals = [torch.zeros_like(x) for _ in range(ranks)]
    local, threshold = [0.0] * ranks, 0.0
    for t in range(tau_prime + 6):
        lr = 0.5 if t < 60 else 0.25
        drawn = [{n: _noise(100 * t + r, *shape) for n, shape in shapes.items()} for r in range(ranks)]
        for name, p in named.items():
            p.grad = drawn[dist.get_rank()][name].clone()
        reducer.finish()
        with torch.no_grad():
            for p in named.values():
                p -= lr * p.grad
        acc = [e + lr * _flat(one) for e, one in zip(residuals, drawn)]
        again = t % tau_prime == 0
        local = [float(a.abs().topk(k).values[-1]) if again else th for a, th in zip(acc, local)]
        chosen = [a.abs() >= th for a, th in zip(acc, local)]
        total = sum(torch.where(mine, a, 0) for mine, a in zip(chosen, acc))
        if again:
            bits = total.abs().topk(k).values[-1].view(torch.int32) >> FINE_SHIFT << FINE_SHIFT
            threshold = float(bits.view(torch.float32))
        passed = total.abs() >= threshold
        x = x - torch.where(passed, total, 0) / ranks
        residuals = [torch.where(mine & passed, 0, a) for mine, a in zip(chosen, acc)]
        counts = [*(int(mine.sum()) for mine in chosen), int(passed.sum())]
        moved = [nudge if c > 5 / 4 * k else 1 / nudge if c < 2 / 3 * k else 1.0 for c in counts]
        local = [th * by for th, by in zip(local, moved)]
        threshold *= moved[-1]
        check_equal(f"step {t}", {"x": _flat(named)}, {"x": x}, 1e-5, relative=0.0)
    reducer.close()


# --- Optimus-CC


def optimus_is_the_published_backward() -> None:
    """Rank 16 with lazy error in the epilogue, one power step from the last factor; forward is exact.

    The first factor is random: the reference begins after the first step, with what the senders remember then."""
    microbatches, stages, shape = 4, 3, (8, 40, 64)
    run = Run("1F1B", microbatches, tw.Wire.of("paper-optimus"), make=lambda index: layer(index, 64))
    batches = [(_noise(t, *shape), _noise(50 + t, *shape)) for t in range(3)]
    run.step(*batches[0], update=True)
    known = _known(run)
    layers = [layer(index, 64) for index in range(stages)]
    for module, rank in zip(layers, known):
        module.load_state_dict(rank["weights"])
    for x, y in batches[1:]:
        run.step(x, y, update=True)
        for module in layers:
            module.zero_grad()
        for m, (part, target) in enumerate(zip(x.chunk(microbatches), y.chunk(microbatches))):
            value, sent = part, []
            for module in layers[:-1]:
                a = module(value)
                value = a.detach().requires_grad_()
                sent.append((a, value))
            nn.functional.mse_loss(layers[-1](value), target).backward()
            for sender, (a, arrived) in reversed(list(enumerate(sent, 1))):
                gradient = arrived.grad
                if m >= microbatches - (stages - sender):
                    memory = known[sender]
                    matrix = gradient.reshape(-1, 64) + memory["e"].reshape(-1, 64)
                    left = torch.linalg.qr(matrix @ memory["q"]).Q
                    memory["q"] = matrix.T @ left
                    memory["e"] = matrix - left @ memory["q"].T
                    gradient = (left @ memory["q"].T).view_as(gradient)
                a.backward(gradient)
        with torch.no_grad():
            for p in (p for module in layers for p in module.parameters()):
                p -= 0.05 * p.grad / microbatches
    mine = dist.get_rank()
    ours = dict(run.stages[0].submod.named_parameters())
    check_equal(f"stage {mine}", ours, dict(layers[mine].named_parameters()), 1e-6, relative=1e-5)


def _known(run: Run) -> list[dict]:
    """By rank: its stage's weights, and of its backward sends the last right factor, 16 columns, and the residual."""
    lane = run.stages[0].lanes.outgoing.get("backward")
    own: dict = {"weights": run.stages[0].submod.state_dict()}
    if lane is not None:
        state = lane.coded[0].state
        own |= {slot: state.read(slot, f"{lane.name}/0") for slot in ("q", "e")}
        check(own["q"].shape == (64, 16), f"the rank is not 16: {own['q'].shape}")
    return gathered(own)


def optimus_is_the_published_averaging() -> None:
    """PowerSGD of rank min(n, m, 128) per tensor with error feedback: small matrices and vectors whole, embeddings
    too. The reference begins after the first step, as above."""
    shapes = {"w": (300, 300), "k": (300, 100), "b": (300,), "embed.weight": (300, 300)}
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    reducer = tw.parallel.Reducer(named.items(), "paper-optimus")
    ranks, mine = dist.get_world_size(), dist.get_rank()
    factor = torch.empty(0)
    errors: list[Tensor] = []
    for t in range(3):
        drawn = [{name: _noise(100 * t + r, *shape) for name, shape in shapes.items()} for r in range(ranks)]
        for name, p in named.items():
            p.grad = drawn[mine][name].clone()
        reducer.finish()
        if t > 0:
            matrices = [one["w"] + e for one, e in zip(drawn, errors)]
            left = torch.linalg.qr(sum(one @ factor for one in matrices) / ranks).Q
            rights = [one.T @ left for one in matrices]
            factor = sum(rights) / ranks
            errors = [one - left @ right.T for one, right in zip(matrices, rights)]
            check_equal(f"step {t}", {"w": named["w"].grad}, {"w": left @ factor.T}, 1e-4, relative=0.0)
        else:
            state = reducer.state_dict()
            factor = next(value for name, value in state.items() if name.endswith("/q0"))
            check(factor.shape == (300, 128), f"the rank is not 128: {factor.shape}")
            residual = next(value for name, value in state.items() if "/e/" in name and value.numel() >= 90_000)
            errors = gathered(residual.reshape(-1)[:90_000].view(300, 300))
        for name in ("k", "b", "embed.weight"):
            exact = sum(one[name] for one in drawn) / ranks
            check_equal(f"step {t}", {name: named[name].grad}, {name: exact}, 1e-6, relative=1e-5)
    reducer.close()


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in tensors.values()])


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
