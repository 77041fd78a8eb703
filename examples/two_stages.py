"""Two processes train one network over a wire: activations go one way as changes, gradients come back in 8 bits.

    torchrun --nproc-per-node 2 examples/two_stages.py            # compressed
    torchrun --nproc-per-node 2 examples/two_stages.py --plain    # what it was before

The lines that thinwire adds are marked. Everything else is plain torch.distributed over Gloo.

Its data are scikit-learn's digits: pip install scikit-learn, or thinwire's extra `theory`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import thinwire as tw

EPOCHS, BATCH, HIDDEN, HELD_OUT = 12, 64, 256, 360


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits: (train x, train y, held-out x, held-out y)."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    return x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT]


def batches(samples: int) -> list[list[int]]:
    """Sample ids of every step of every epoch, the same on both ranks."""
    g = torch.Generator().manual_seed(1)
    return [part.tolist() for _ in range(EPOCHS) for part in torch.randperm(samples, generator=g).split(BATCH)]


class Wire:
    """Sends and receives activations and gradients; `plain` is what the script did before."""

    def __init__(self, plain: bool, peer: int) -> None:
        self.plain, self.peer, self.bytes = plain, peer, 0
        self.forward = tw.Channel(tw.codecs.Quantize(4), tw.memory.Delta())  # thinwire
        self.backward = tw.Channel(tw.codecs.Quantize(8), tw.memory.Plain())  # thinwire

    def send(self, channel: tw.Channel, key: object, x: Tensor) -> None:
        message = x.contiguous() if self.plain else channel.send(key, x)  # thinwire
        dist.send(message, self.peer)
        self.bytes += message.nbytes

    def recv(self, channel: tw.Channel, key: object, shape: tuple[int, ...]) -> Tensor:
        if self.plain:
            x = torch.empty(shape)
            dist.recv(x, self.peer)
            return x
        frame = torch.empty(channel.nbytes(key, shape, torch.float32), dtype=torch.uint8)  # thinwire
        dist.recv(frame, self.peer)
        return channel.recv(key, frame, shape, torch.float32)  # thinwire


def train(rank: int, wire: Wire) -> nn.Module:
    x, y, _, _ = data()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU()) if rank == 0 else nn.Linear(HIDDEN, 10)
    optimiser = torch.optim.SGD(stage.parameters(), lr=0.5)
    for ids in batches(len(x)):
        optimiser.zero_grad()
        if rank == 0:
            activation = stage(x[ids])
            wire.send(wire.forward, ids, activation.detach())
            activation.backward(wire.recv(wire.backward, "boundary", tuple(activation.shape)))
        else:
            received = wire.recv(wire.forward, ids, (len(ids), HIDDEN)).requires_grad_()
            nn.functional.cross_entropy(stage(received), y[ids]).backward()
            wire.send(wire.backward, "boundary", received.grad)
        optimiser.step()
    return stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="send float32, as before")
    plain = parser.parse_args().plain
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wire = Wire(plain, peer=1 - rank)
    stage = train(rank, wire)
    _, _, x, y = data()
    sent = torch.tensor([wire.bytes])
    dist.all_reduce(sent)
    if rank == 0:
        dist.send(stage(x).detach(), 1)
    else:
        held_out = torch.empty(HELD_OUT, HIDDEN)
        dist.recv(held_out, 0)
        accuracy = (stage(held_out).argmax(1) == y).float().mean()
        print(f"{'float32' if plain else 'thinwire'}: held-out accuracy {accuracy:.3f}, {int(sent) / 1e6:.1f} MB sent")
        if not plain:
            print(
                f"samples remembered: {wire.forward.stats.hit_rate:.0%} of visits; ratio {wire.forward.stats.ratio:.1f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
