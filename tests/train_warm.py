"""What ranks of a training import, once: they are forked from a process that has imported this."""

from __future__ import annotations

import train_ranks  # noqa: F401
import warm  # noqa: F401
from torch.utils import tensorboard  # noqa: F401
from transformers.models.auto import configuration_auto  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401

import thinwire.train.rank  # noqa: F401
