"""Which parameters are averaged, and what is refused: state is keyed by their names, and only real, dense values are
averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError


def trainable_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """name → parameter, of model.named_parameters() or a list like it, those that require a gradient.

    UsageError where something else than pairs is given, or a name stands twice.
    """
    out: dict[str, nn.Parameter] = {}
    for one in named_parameters:
        if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], str):
            raise UsageError(f"pairs of a name and a parameter are wanted (model.named_parameters()), not {type(one)}")
        name, parameter = one
        if name in out:
            raise UsageError(f"two parameters are called {name!r}: names key the state")
        if parameter.requires_grad:
            out[name] = parameter
    return out


def describe_parameters(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and dtype of each, as fields for `check_agreement`. UsageError for types that are not real floating ones.

    (DDP's buckets show half of a complex gradient: the other half would be averaged by nobody. Gradients of 8 bits
    cannot be added.)
    """
    for name, p in parameters.items():
        if not p.is_floating_point():
            hint = "; hold it as torch.view_as_real(…)" if p.is_complex() else ""
            raise UsageError(f"{name} is of {p.dtype}: allowed are real floating types{hint}")
        if p.dtype.itemsize == 1:
            hint = "; train a copy of 16 or 32 bits"
            raise UsageError(f"{name} is of {p.dtype}: allowed are real floating types that torch can add{hint}")
    return {f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in parameters.items()}


def sparse_gradient(name: str, gradient: Tensor) -> UsageError:
    """The error for a gradient that is not dense, such as an embedding with sparse=True gives."""
    return UsageError(f"{name} has a gradient of {gradient.layout}: only dense ones are averaged (sparse=False)")


def refuse_capture() -> None:
    """UsageError where a CUDA graph is being captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "gradients cannot be exchanged in a CUDA graph, since sizes and errors are read on the host: capture "
            "forward and backward without the exchange (no_sync), or nothing"
        )


def check_frozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """UsageError where one of these parameters trains now (nobody averages it), or a CUDA graph is being captured."""
    refuse_capture()
    for name, p in frozen.items():
        if p.requires_grad:
            raise UsageError(
                f"{name} trains now and did not when thinwire was attached, so nobody averages it: wrap and attach "
                "again after thawing (load_state_dict carries residuals over)"
            )


def buffer_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """In which gradients of these are averaged."""
    return torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32


def store_gradient(parameter: nn.Parameter, mean: Tensor | None) -> None:
    """.grad ← mean; a parameter that nobody used keeps what it has."""
    if mean is None:
        return
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(mean)
