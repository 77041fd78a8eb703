"""Selection by magnitude in O(n): histogram of the high bits → k-th magnitude → compact; and its inverse.

`torch.topk` sorts; a training step needs only "the entries above a threshold, in index order". The bits of
|x| as an integer are ordered like |x|, so a histogram of the leading bits, refined twice, gives the exact k-th
magnitude. Ties at the threshold are taken in index order up to the count asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.dispatch import choose, load

HISTOGRAM_SHIFT = 20  # of the 31 magnitude bits of a float32: 2048 bins, eight to an octave
BINS = 1 << (31 - HISTOGRAM_SHIFT)


def histogram(x: Tensor, impl: str | None = None) -> Tensor:
    """int64[2048]: how many |x| (as float32) fall into each bin of the leading 11 magnitude bits."""
    impl = choose(x, impl)
    if impl != "reference":
        return load(impl, "select").histogram(x.contiguous())
    return torch.bincount(magnitude_bits(x) >> HISTOGRAM_SHIFT, minlength=BINS)


def threshold_from(counts: Tensor, k: int) -> Tensor:
    """0-d float32: the largest bin edge with at least k magnitudes at or above it. No host sync."""
    above = counts.flip(0).cumsum(0).flip(0)
    index = (above >= k).sum().clamp(min=1) - 1
    return (index << HISTOGRAM_SHIFT).to(torch.int32).view(torch.float32)


def kth_magnitude(x: Tensor, k: int, impl: str | None = None) -> Tensor:
    """0-d tensor in x's dtype: the k-th largest |x|, exactly; 1 ≤ k ≤ n."""
    impl = choose(x, impl)
    if impl != "reference":
        return load(impl, "select").kth_magnitude(x.contiguous(), k)
    return x.abs().kthvalue(x.numel() - k + 1).values


def select(x: Tensor, threshold: Tensor | float, cap: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """(int64 indices ascending, values) of |x| ≥ threshold, the first `cap` of them."""
    impl = choose(x, impl)
    if impl != "reference":
        limit = threshold if impl == "gpu" else float(threshold)
        return load(impl, "select").select(x.contiguous(), limit, cap)
    index = torch.nonzero(x.abs() >= threshold).reshape(-1)[:cap]
    return index, x[index]


def select_into(x: Tensor, threshold: Tensor | float, index: Tensor, values: Tensor, impl: str | None = None) -> Tensor:
    """`select` into given memory, int64[cap] and x's dtype [cap]: 0-d int64, how many entries there are.

    Places left over hold index −1 and value 0; entries beyond the capacity are not written and stay where they
    are, in x. Nothing here waits for the card, and the threshold may be a tensor on it.
    """
    impl = choose(x, impl)
    if impl == "gpu":
        return load(impl, "select").select_into(x.contiguous(), threshold, index, values)
    place, entries = select(x, threshold, x.numel(), impl)
    index.fill_(-1)[: place.numel()] = place[: index.numel()]
    values.zero_()[: place.numel()] = entries[: index.numel()]
    return torch.tensor(place.numel(), device=x.device)


def top(x: Tensor, k: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """(int64[k] ascending, values[k]): the k largest magnitudes, ties by index."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device), x[:0]
    impl = choose(x, impl)
    if impl != "reference":
        return load(impl, "select").top(x.contiguous(), k)
    threshold = kth_magnitude(x, k, "reference")
    above = x.abs() > threshold
    ties = (x.abs() == threshold) & ~above
    keep = above | (ties & (ties.cumsum(0) <= k - above.sum()))
    index = torch.nonzero(keep).reshape(-1)
    return index, x[index]


def scatter_add(out: Tensor, index: Tensor, values: Tensor, impl: str | None = None) -> Tensor:
    """out[index] += values in place; indices must be different from each other and inside out."""
    impl = choose(out, impl)
    if impl != "reference":
        return load(impl, "select").scatter_add(out, index.contiguous(), values.contiguous())
    return out.index_add_(0, index, values.to(out.dtype))


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x| as float32, int64: they order as the magnitudes do."""
    return (x.float().view(torch.int32) & 0x7FFFFFFF).long()
