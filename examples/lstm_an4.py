"""A two-layer LSTM on AN4's speech with compressed gradients: Ok-Topk's second task. `thinwire` marks what it takes.

torchrun --nproc-per-node 4 examples/lstm_an4.py DATA                    # Ok-Topk
torchrun --nproc-per-node 4 examples/lstm_an4.py DATA --exact 128 --sgd --lr 0.1   # as the authors
torchrun --nproc-per-node 4 examples/lstm_an4.py DATA --wire off         # exact
torchrun --nproc-per-node 2 examples/lstm_an4.py --quick                 # a few seconds of made-up speech

DATA is AN4's folder with etc/an4_{train,test}.{fileids,transcription} and feat/*.mfc, as in
github.com/cphazen/Machine-Learning-Project-ASR (an4). The LSTM spells what it hears, letter by letter (CTC).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw  # thinwire

LETTERS = "_ ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # the first is CTC's blank
WIDTH = 13  # of a frame of features
Speech = list[tuple[Tensor, str]]  # [frames, WIDTH], and what is said


class Speller(nn.Module):
    """Frames → letters: two LSTM layers and a linear one. width: of what it takes at once."""

    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.letters = nn.Linear(hidden, len(LETTERS))

    def forward(self, frames: Tensor) -> Tensor:
        """[rows, frames, width] → [rows, frames, letters]: logarithms of probabilities."""
        return self.letters(self.lstm(frames)[0]).log_softmax(-1)


def read_an4(folder: Path, part: str) -> Speech:
    """Features in Sphinx's format: a count, then big-endian floats, 13 per frame; normalised per utterance."""
    files = (folder / "etc" / f"an4_{part}.fileids").read_text().split()
    lines = (folder / "etc" / f"an4_{part}.transcription").read_text().strip().splitlines()
    out = []
    for name, line in zip(files, lines, strict=True):
        raw = np.fromfile(folder / "feat" / f"{name}.mfc", ">f4")[1:].astype(np.float32)
        frames = torch.from_numpy(raw.reshape(-1, WIDTH))
        words = line.rpartition("(")[0].replace("<s>", "").replace("</s>", "")
        out.append(((frames - frames.mean(0)) / (frames.std(0) + 1e-5), " ".join(words.split())))
    return out


def made_up(count: int, seed: int) -> Speech:
    """Each letter of A to D is a few frames in which one feature is high."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        said = torch.randint(0, 4, (3,), generator=generator)
        frames = 0.1 * torch.randn(24, WIDTH, generator=generator)
        for place, letter in enumerate(said.tolist()):
            frames[8 * place : 8 * place + 5, 3 * letter] += 2
        out.append((frames, "".join("ABCD"[letter] for letter in said.tolist())))
    return out


def batch_of(speech: Speech) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded frames, how many there are of each, all letters one after another, how many of each."""
    frames = nn.utils.rnn.pad_sequence([one for one, _ in speech], batch_first=True)
    codes = [[LETTERS.index(letter) for letter in words] for _, words in speech]
    lengths = torch.tensor([len(one) for one, _ in speech])
    return frames, lengths, torch.tensor([c for one in codes for c in one]), torch.tensor([len(one) for one in codes])


@torch.no_grad()
def letter_errors(model: nn.Module, speech: Speech, device: torch.device) -> float:
    """Edits per letter that turn the most likely letters into what was said."""
    wrong = total = 0
    for start in range(0, len(speech), 50):
        part = speech[start : start + 50]
        frames, lengths, _, _ = batch_of(part)
        best = model(frames.to(device)).argmax(-1).cpu()
        for row, length, (_, said) in zip(best, lengths.tolist(), part):
            kept = torch.unique_consecutive(row[:length])
            wrong += edits("".join(LETTERS[i] for i in kept.tolist() if i), said)
            total += len(said)
    return wrong / total


def edits(a: Sequence[str], b: Sequence[str]) -> int:
    """Insertions, deletions and replacements that turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, help="AN4's folder")
    parser.add_argument("--quick", action="store_true", help="a small network on made-up speech")
    parser.add_argument("--wire", default="paper-oktopk", help="a preset's name")
    parser.add_argument("--exact", type=int, default=0, help="exact steps at the start; the authors have 128")
    parser.add_argument("--epochs", type=int, default=None, help="default: 100, or 4 with --quick")
    parser.add_argument("--batch", type=int, default=8, help="per rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sgd", action="store_true", help="with momentum 0.9, instead of Adam; wants another --lr")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data is None and not options.quick:
        parser.error("which folder? or --quick")
    if not options.quick and not (options.data / "etc").is_dir():
        parser.error(f"{options.data} has no folder etc")
    epochs = options.epochs or (4 if options.quick else 100)

    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    torch.manual_seed(options.seed)
    if options.quick:
        train, test = made_up(160, 1), made_up(20, 2)
    else:
        train, test = read_an4(options.data, "train"), read_an4(options.data, "test")
    model = DistributedDataParallel(Speller(64 if options.quick else 800).to(device))
    wire = tw.Wire.of(options.wire)  # thinwire
    if options.exact and wire.gradient:  # thinwire
        wire = replace(wire, gradient=replace(wire.gradient, warmup=options.exact))  # thinwire
    handle = tw.parallel.compress_ddp(model, wire)  # thinwire
    rate = options.lr * (10 if options.quick else 1)
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    optimizer = sgd(model.parameters(), rate, momentum=0.9) if options.sgd else adam(model.parameters(), rate)
    steps = len(train) // (options.batch * size)
    if steps == 0:
        raise SystemExit(f"{len(train)} utterances are less than a step: {size} ranks × --batch {options.batch}")
    for epoch in range(epochs):
        shuffle = torch.Generator().manual_seed(options.seed * 1000 + epoch)
        order = torch.randperm(len(train), generator=shuffle).tolist()
        for step in range(steps):
            rows = order[(step * size + rank) * options.batch :][: options.batch]
            frames, lengths, letters, counts = batch_of([train[row] for row in rows])
            heard = model(frames.to(device)).transpose(0, 1)
            loss = nn.functional.ctc_loss(heard, letters.to(device), lengths, counts, zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, letter errors {letter_errors(model.module, test, device):.4f}")
    if rank == 0:
        print(handle.summary())  # thinwire
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
