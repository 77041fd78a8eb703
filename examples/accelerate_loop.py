"""A loop on Hugging Face Accelerate with compressed gradients: the lines marked `thinwire`.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py

The second needs no GPU: --multi_gpu stands for several processes, and with --cpu Accelerate 1.15 starts only one.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw  # thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.print(f"{accelerator.num_processes} processes")
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = DataLoader(TensorDataset(inputs, torch.sin(inputs[:, :4].sum(1, keepdim=True))), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), data)
    handle = tw.parallel.compress_ddp(model, "paper-oktopk", scaler=accelerator.scaler)  # thinwire

    for epoch in range(options.epochs):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.gather(loss.detach()).mean():.4f}")

    if options.save:
        accelerator.save_state(options.save)
        torch.save(handle.state_dict(), f"{options.save}/thinwire-{accelerator.process_index}.pt")  # thinwire
    handle.close()  # thinwire: before the process group goes
    accelerator.end_training()


if __name__ == "__main__":
    main()
