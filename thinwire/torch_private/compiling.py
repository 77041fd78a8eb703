"""How often torch compiles one function anew; torch has no public name for it."""

from __future__ import annotations

import torch._dynamo.config as compiling


def many_shapes(most: int) -> None:
    """Let `torch.compile` make so many versions of a function, for unlike modules and shapes, before it gives up."""
    compiling.recompile_limit = most
