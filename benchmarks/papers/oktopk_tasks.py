"""The tasks of oktopk.py: Ok-Topk's own (VGG-16 on CIFAR-10, an LSTM on AN4), and a Llama-class model on code.

A task gives every step's batches of all workers, the loss of one worker's batch, and what is measured at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from lstm_an4 import LETTERS, WIDTH, Speller, batch_of, edits
from oktopk_data import VOCABULARY, Data
from oktopk_models import Llama
from vgg_cifar10 import as_input, vgg16

Batch = list[Any]  # per part, or per worker where workers' shapes differ
PAD = 4  # pixels a picture is shifted by at most
CHUNK = 5000  # pictures that are shifted at a time


class Task:
    """data: as oktopk_data reads it. device: where everything is computed. quick: a small network."""

    name = ""
    optimiser, rate, clip, decay = "SGD", 0.1, 0.0, 5e-4
    batch = 256  # of all workers together
    full, warmup = 0, 0  # the full schedule, in epochs; exact steps of a method that has them, as in the authors' code
    is_static = True  # shapes are the same every step: can be captured in a CUDA graph

    def __init__(self, data: Data, device: torch.device, quick: bool) -> None:
        self.data, self.device, self.quick = data, device, quick
        if quick:
            self.batch, self.warmup = 32, 3

    def steps(self, epochs: float) -> int:
        return max(1, round(epochs * self.samples / self.batch))

    @property
    def samples(self) -> int:
        raise NotImplementedError

    def build(self) -> nn.Module:
        raise NotImplementedError

    def batches(self, seed: int, workers: int, steps: int) -> Iterator[Batch]:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch, worker: int) -> Tensor:
        raise NotImplementedError

    def measure(self, model: nn.Module) -> dict[str, float]:
        """The first entry is the loss that is held out."""
        raise NotImplementedError

    def optimiser_of(self, flat: Tensor, rate: float) -> torch.optim.Optimizer:
        fused = flat.is_cuda
        if self.optimiser == "SGD":
            return torch.optim.SGD([flat], lr=rate, momentum=0.9, weight_decay=self.decay, fused=fused)
        decay = 0.1 if self.optimiser == "AdamW" else 0.0
        return torch.optim.AdamW([flat], lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=fused)


class Vgg(Task):
    """SGD with momentum. Batch norm takes each worker's own batch; what evaluation uses is worker 0's running mean, as
    DDP has it."""

    name, full, warmup = "vgg", 20, 512

    def __init__(self, data: Data, device: torch.device, quick: bool) -> None:
        super().__init__(data, device, quick)
        pictures, self.labels = data["train"][0], data["train"][1].to(device)
        self.padded = F.pad(pictures.to(device), (PAD,) * 4)
        self.held = data["test"][0].to(device), data["test"][1].to(device)

    @property
    def samples(self) -> int:
        return len(self.labels)

    def build(self) -> nn.Module:
        return vgg16(1 / 16 if self.quick else 1.0)

    def batches(self, seed: int, workers: int, steps: int) -> Iterator[Batch]:
        per_epoch, each = self.samples // self.batch, self.batch // workers
        for first in range(0, steps, per_epoch):
            generator = torch.Generator().manual_seed(1000 * seed + first // per_epoch)
            order = torch.randperm(self.samples, generator=generator).to(self.device)
            pictures = self.shifted(order, generator)
            labels = self.labels[order]
            for step in range(min(per_epoch, steps - first)):
                rows = slice(step * self.batch, step * self.batch + each * workers)
                yield [pictures[rows].view(workers, each, 3, 32, 32), labels[rows].view(workers, each)]

    def shifted(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The pictures in that order, each flipped half of the time and shifted by up to PAD pixels."""
        places = torch.randint(0, 2 * PAD + 1, (2, len(order)), generator=generator).to(self.device)
        flips = (torch.rand(len(order), generator=generator) < 0.5).to(self.device)
        across, out = torch.arange(32, device=self.device), []
        channels = torch.arange(3, device=self.device)[:, None, None]
        for part in torch.arange(len(order), device=self.device).split(CHUNK):
            columns = torch.where(flips[part, None], across.flip(0), across) + places[1, part, None]
            lines = across + places[0, part, None]
            picked = order[part][:, None, None, None]
            out.append(self.padded[picked, channels, lines[:, None, :, None], columns[:, None, None, :]])
        return torch.cat(out)

    def loss(self, model: nn.Module, batch: Batch, worker: int) -> Tensor:
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.track_running_stats = worker == 0
        pictures = as_input(batch[0]).contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(model(pictures).float(), batch[1])

    def measure(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        outs = [
            model(as_input(part).contiguous(memory_format=torch.channels_last)) for part in self.held[0].split(1000)
        ]
        model.train()
        logits = torch.cat(outs).float()
        return {
            "loss": float(F.cross_entropy(logits, self.held[1])),
            "error": 100 * float((logits.argmax(1) != self.held[1]).float().mean()),
        }


class Code(Task):
    """Next token of Python source, AdamW."""

    name, optimiser, rate, full = "llama", "AdamW", 1e-3, 2
    batch, length = 32, 256

    def __init__(self, data: Data, device: torch.device, quick: bool) -> None:
        super().__init__(data, device, quick)
        self.length = 16 if quick else 256
        self.train, held = data["train"].to(device), data["held"].to(device)
        start = torch.linspace(0, len(held) - self.length - 1, 64 if quick else 1024).long()
        self.held = held[start[:, None].to(device) + torch.arange(self.length + 1, device=device)].long()

    @property
    def samples(self) -> int:
        return len(self.train) // self.length

    def build(self) -> nn.Module:
        if self.quick:
            return Llama(64, layers=1, width=32, heads=2, hidden=64)
        return Llama(VOCABULARY, layers=6, width=384, heads=6, hidden=1024)

    def batches(self, seed: int, workers: int, steps: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1000 * seed + 1)
        shape = (steps, workers, self.batch // workers, 1)
        start = torch.randint(len(self.train) - self.length - 1, shape, generator=generator).to(self.device)
        for step in range(steps):
            yield [self.train[start[step] + torch.arange(self.length + 1, device=self.device)].long()]

    def loss(self, model: nn.Module, batch: Batch, worker: int) -> Tensor:
        return next_token_loss(model, batch[0])

    def measure(self, model: nn.Module) -> dict[str, float]:
        return {
            "loss": math.fsum(float(next_token_loss(model, part)) * len(part) for part in self.held.split(64))
            / len(self.held)
        }


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


class Speech(Task):
    """Letters of spoken words (CTC), Adam; workers' utterances differ in length."""

    name, optimiser, rate, clip, full, warmup = "an4", "Adam", 1e-3, 5.0, 40, 128
    batch, is_static = 16, False
    hidden, stacked = 800, 3  # of the LSTM; frames that it takes at once

    @property
    def samples(self) -> int:
        return len(self.data["train"])

    def build(self) -> nn.Module:
        return Speller(32 if self.quick else self.hidden, self.stacked * WIDTH)

    def batches(self, seed: int, workers: int, steps: int) -> Iterator[Batch]:
        speech, per_epoch, each = self.data["train"], self.samples // self.batch, self.batch // workers
        for step in range(steps):
            if step % per_epoch == 0:
                generator = torch.Generator().manual_seed(1000 * seed + step // per_epoch)
                order = torch.randperm(self.samples, generator=generator).tolist()
            rows = order[step % per_epoch * self.batch :][: each * workers]
            yield [self.padded([speech[row] for row in rows[w::workers]]) for w in range(workers)]

    def padded(self, speech: list[tuple[Tensor, str]]) -> tuple[Tensor, ...]:
        """`stacked` frames side by side; those that are left over at the end are left out."""
        width = self.stacked * WIDTH
        stacked = [(one[: len(one) // self.stacked * self.stacked].reshape(-1, width), said) for one, said in speech]
        frames, lengths, letters, counts = batch_of(stacked)
        return frames.to(self.device), lengths, letters.to(self.device), counts

    def loss(self, model: nn.Module, batch: Batch, worker: int) -> Tensor:
        frames, lengths, letters, counts = batch
        heard = model(frames).transpose(0, 1).float()
        return F.ctc_loss(heard, letters, lengths, counts, zero_infinity=True)

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Loss; edits per letter and per word of the most likely letters, in %."""
        speech = self.data["test"]
        loss, wrong = 0.0, {"letters": [0, 0], "words": [0, 0]}
        for start in range(0, len(speech), 65):
            part = speech[start : start + 65]
            batch = self.padded(part)
            loss += float(self.loss(model, list(batch), 0)) * len(part)
            best = model(batch[0]).argmax(-1).cpu()
            for row, length, (_, said) in zip(best, batch[1].tolist(), part):
                kept = torch.unique_consecutive(row[:length]).tolist()
                heard = "".join(LETTERS[i] for i in kept if i)
                for name, a, b in (("letters", heard, said), ("words", heard.split(), said.split())):
                    wrong[name][0] += edits(a, b)
                    wrong[name][1] += len(b)
        return {"loss": loss / len(speech)} | {name: 100 * a / b for name, (a, b) in wrong.items()}


class SmallSpeech(Speech):
    """A network that a core can train in minutes: 0.8 instead of 7.8 million parameters, at its own rate."""

    name, rate, hidden = "an4-small", 2e-3, 256


class MomentumSpeech(Speech):
    """With SGD and momentum, as the authors train their LSTM."""

    name, optimiser, rate, decay = "an4-sgd", "SGD", 0.1, 1e-4


class SmallMomentumSpeech(MomentumSpeech):
    """The network of SmallSpeech, trained as the authors train theirs, at its own rate."""

    name, hidden, rate = "an4-small-sgd", 256, 0.4


ALL = (Vgg, Code, Speech, MomentumSpeech, SmallSpeech, SmallMomentumSpeech)
TASKS: dict[str, type[Task]] = {task.name: task for task in ALL}
