"""Configurations for torchtitan: its debug Llama between two sites, as torchtitan sends and compressed.

    torchrun --nproc-per-node 4 -m torchtitan.train --module examples.torchtitan_debug --config debug_thin

In a configuration of your own the one line is `tw.parallel.compress_titan(config, "safe")`.
"""

from __future__ import annotations

import os

import torch
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss
from torchtitan.trainer import Trainer

import thinwire as tw


def debug() -> Trainer.Config:
    """The debug Llama on two sites (replicas), each of which shards over the ranks that are left."""
    config = llama3_debugmodel_ce_loss()
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    if not torch.cuda.is_available():  # FlexAttention has no backward on CPUs
        config.training.disable_cuda_graphs = True
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def debug_thin() -> Trainer.Config:
    """The same with what crosses between sites, and between pipeline stages, compressed; WIRE names another preset."""
    return tw.parallel.compress_titan(debug(), os.environ.get("WIRE", "safe"))
