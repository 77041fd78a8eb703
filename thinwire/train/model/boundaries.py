"""Learned boundaries of a run: around its stages, and beside its exported model, with the hooks that put them back in.

out/model/boundaries.safetensors     {layer before which the boundary lies}/basis; tokens and lift of its anchors; table

transformers loads the folder as it is, but that model computes something else: the residual stream then passes whole
where training cut it. `attach_boundaries(model, folder)` cuts it in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.boundaries.projected import Projected
from thinwire.errors import UsageError
from thinwire.train.config.families import FAMILIES
from thinwire.train.config.sections import TrainConfig

FILE = "boundaries.safetensors"


def learned_boundaries(config: TrainConfig, vocabulary: int) -> Projected | None:
    """`[boundary]`; None where hidden states cross whole. vocabulary: the model's."""
    given = config.boundary
    if not given.rank:
        return None
    return Projected(given.rank, given.anchors, vocabulary, given.rate, given.every, config.run.seed, given.tables)


def bounded(
    projected: Projected, modules: Mapping[int, nn.Module], rank_of: Sequence[int], hidden: int, device: torch.device
) -> dict[int, nn.Module]:
    """The stages' modules between their boundaries; between two stages of one rank hidden states pass whole."""
    inside = [s for s in range(len(rank_of) - 1) if rank_of[s] == rank_of[s + 1]]
    return {
        index: projected.around(module, index, len(rank_of), hidden, inside=inside, device=device)
        for index, module in modules.items()
    }


def by_layer(ends: Mapping[int, nn.Module], layers: tuple[range, ...]) -> dict[str, Tensor]:
    """What the file holds, but for tables. ends: by boundary. layers: of each stage."""
    return {
        f"{layers[boundary + 1].start}/{name}": value.detach().cpu()
        for boundary, end in ends.items()
        for name, value in end.named_parameters()
    }


def read_boundaries(folder: Path) -> dict[int, dict[str, Tensor]]:
    """A model's boundaries, by the number of the layer before which each lies. folder: where the model is."""
    from safetensors.torch import load_file

    path = folder / FILE
    if not path.exists():
        raise UsageError(f"{path}: no such file; a model that was trained without [boundary] needs none")
    out: dict[int, dict[str, Tensor]] = {}
    for name, value in load_file(path).items():
        number, _, part = name.partition("/")
        out.setdefault(int(number), {})[part] = value
    return out


def attach_boundaries(model: Any, folder: str | Path) -> list[Any]:
    """Put the boundaries that a model was trained with back into it; returns the hooks' handles.

    model: what transformers loaded from the folder. folder: where `thinwire train` wrote it.
    """
    found = read_boundaries(Path(folder))
    family = FAMILIES[model.config.model_type]
    layers = model.get_submodule(f"{family.root}.{family.layers}")
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen["tokens"] = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    handles = [model.register_forward_pre_hook(note, with_kwargs=True)]
    for number, own in sorted(found.items()):
        handles.append(layers[number].register_forward_pre_hook(cutting(own, seen), with_kwargs=True))
    return handles


def cutting(own: Mapping[str, Tensor], seen: Mapping[str, Tensor], share: Callable[[], float] = lambda: 0.0) -> Any:
    """A hook that leaves of a layer's hidden states what crosses its boundary.

    own: of the boundary. seen: has the "tokens" of the call, for anchors and the table. share: of what does not cross,
    kept too.
    """
    held = dict(own)

    def cut(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if share() == 1:
            return args, kwargs
        named = "hidden_states" in kwargs
        x: Tensor = kwargs["hidden_states"] if named else args[0]
        if held["basis"].device != x.device:
            held.update({name: value.to(x.device) for name, value in own.items()})
        basis = held["basis"].to(x)
        anchor: Tensor | float = 0.0
        if "tokens" in held:
            anchor = functional.embedding(seen["tokens"], held["tokens"].to(x)) @ held["lift"].to(x)
        y = (x - anchor) @ basis @ basis.T + anchor
        if "table" in held:
            y = y + functional.embedding(seen["tokens"], held["table"]).to(x)
        y = y + share() * (x - y)
        return (args, {**kwargs, "hidden_states": y}) if named else ((y, *args[1:]), kwargs)

    return cut
