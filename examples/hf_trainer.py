"""Hugging Face's Trainer with compressed gradients: the two lines marked `thinwire`. Resumes from its checkpoints.

torchrun --nproc-per-node 2 examples/hf_trainer.py --out out/hf
torchrun --nproc-per-node 2 examples/hf_trainer.py --out out/hf --steps 12 --resume
torchrun --nproc-per-node 2 -m thinwire run --trainer huggingface --wire max examples/hf_trainer.py --plain
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from thinwire.data_parallel.trainers import compress_trainer  # thinwire


class Counting(Dataset):
    """Sequences that count upwards from a random start, modulo the vocabulary."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) + 7 * i) % 64
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/hf_trainer", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    parser.add_argument("--plain", action="store_true", help="without thinwire, as for `thinwire run`")
    options = parser.parse_args()

    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    arguments = TrainingArguments(
        options.out, use_cpu=True, ddp_backend="gloo", max_steps=options.steps, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, save_steps=4,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Counting())
    if not options.plain:
        compress_trainer(trainer, "paper-oktopk")  # thinwire
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
