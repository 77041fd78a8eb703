"""Lightning's Trainer with compressed gradients: the two lines marked `thinwire`. Checkpoints hold all ranks' state.

torchrun --nproc-per-node 2 examples/lightning_ddp.py --out out/lightning
torchrun --nproc-per-node 2 examples/lightning_ddp.py --out out/lightning --epochs 4 --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.data_parallel.trainers import compress_trainer  # thinwire


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}: loss {float(self.trainer.callback_metrics['loss']):.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/lightning", help="where the checkpoint goes")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in --out")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 16)
    data = DataLoader(TensorDataset(inputs, torch.sin(inputs[:, :4].sum(1, keepdim=True))), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=options.epochs,
        accumulate_grad_batches=2, logger=False,
        callbacks=[ModelCheckpoint(options.out, filename="last", enable_version_counter=False)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    compress_trainer(trainer, "paper-oktopk")  # thinwire
    trainer.fit(Regression(), data, ckpt_path=Path(options.out, "last.ckpt") if options.resume else None)


if __name__ == "__main__":
    main()
