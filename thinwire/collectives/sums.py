"""Sums that leave the range of their type although the mean does not, as 3e38 + 3e38 does in float32.

They are added again in a larger unit, a power of two: every value is divided by it before it is added. So no bit
changes where nothing overflows. The unit has a factor of two to spare for what coding adds to a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import is_finite
from thinwire.collectives.groups import Group, world
from thinwire.collectives.messages import all_reduce_steps
from thinwire.errors import InvalidExchange
from thinwire.steps import Steps, finish


def large_unit(size: int) -> float:
    """The power of two in which the sum of `size` values is in range if each of them is; 1 for one value."""
    return float(2 << (size - 1).bit_length()) if size > 1 else 1.0


def may_overflow(values: Tensor, size: int) -> Tensor:
    """0-d bool: could the sum of these values and those of `size` − 1 others like them leave the range?"""
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return values.abs().max() > torch.finfo(values.dtype).max / (2 * size)


def exact_mean(x: Tensor, group: Group) -> Tensor:
    """The mean of x over the group. InvalidExchange on all members where it is NaN or Inf.

    Its sum has the same bits on all members, so all see alike that it is out of range, and add again.
    """
    return finish(exact_mean_steps(x, group))


def exact_mean_steps(x: Tensor, group: Group) -> Steps[Tensor]:
    """`exact_mean`, stopping where it would wait. On a card it does not wait, and raises nothing: values are divided
    first, so that no sum leaves the range unless the mean does, and the caller looks whether the mean is finite."""
    size, _ = world(group)
    if x.is_cuda:
        return (yield from all_reduce_steps(x / size, group, in_place=True))
    total = yield from all_reduce_steps(x, group)
    if bool(is_finite(total)):
        return total / size
    unit = large_unit(size)
    mean = (yield from all_reduce_steps(x / unit, group)) / (size / unit)
    if not bool(is_finite(mean)):
        raise InvalidExchange("the mean is NaN or Inf")
    return mean
