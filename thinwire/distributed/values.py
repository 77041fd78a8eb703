"""Values between ranks without pickles: torch's own `*_object` calls send pickles, which run code at the receiver.

Small values travel as JSON, in two rounds: lengths, then texts padded to the longest. Tuples arrive as lists, keys of
tables as texts. Tensors travel as their bytes, described by JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.groups import Group, has_cpu_backend, members, world
from thinwire.collectives.messages import gather

LIMIT = 64 << 20  # bytes; more is a mistake, or somebody else's doing


def gather_json(value: Any, group: Group = None) -> list[Any]:
    """Every rank's value, in rank order. `value` is anything that JSON can hold."""
    if world(group)[0] == 1:
        return [json.loads(json.dumps(value))]
    text = _encode(value, _device(group))
    lengths = [int(length) for length in gather(torch.tensor([text.numel()], device=text.device), group)]
    _check(max(lengths))
    padded = torch.nn.functional.pad(text, (0, max(lengths) - text.numel()))
    return [_decode(received[:length]) for received, length in zip(gather(padded, group), lengths)]


def broadcast_json(value: Any, source: int = 0, group: Group = None) -> Any:
    """The value that rank `source` of the group gives; what the others give is not looked at."""
    size, rank = world(group)
    if size == 1:
        return json.loads(json.dumps(value))
    device, everyone = _device(group), members(group)
    text = _encode(value if rank == source else None, device)
    length = torch.tensor([text.numel()], device=device)
    everyone.broadcast(length, source)
    _check(int(length))
    if rank != source:
        text = torch.empty(int(length), dtype=torch.uint8, device=device)
    everyone.broadcast(text, source)
    return _decode(text)


def tensors_on_first(tensors: Mapping[str, Tensor], group: Group = None) -> list[dict[str, Tensor]]:
    """On rank 0 of the group every rank's tensors by name, in rank order and on the CPU; elsewhere nothing."""
    rank = world(group)[1]
    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    about = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in held.items()]
    everyone = gather_json(about, group)
    if rank == 0:
        return [
            {name: t.cpu() for name, t in held.items()} if source == 0 else _receive_tensors(listed, source, group)
            for source, listed in enumerate(everyone)
        ]
    for tensor in held.values():
        if tensor.numel():
            members(group).isend(tensor.to(_device(group)), 0).wait()
    return []


def _receive_tensors(listed: list[Any], source: int, group: Group) -> dict[str, Tensor]:
    out = {}
    for name, shape, kind in listed:
        dtype = getattr(torch, str(kind), None)
        if not isinstance(dtype, torch.dtype) or math.prod(shape) < 0:
            raise RuntimeError(f"rank {source} announces {name} of type {kind} and shape {shape}")
        tensor = torch.empty(shape, dtype=dtype, device=_device(group))
        if tensor.numel():
            members(group).irecv(tensor, source).wait()
        out[str(name)] = tensor.cpu()
    return out


def _device(group: Group) -> str:
    return "cpu" if has_cpu_backend(group) else "cuda"


def _encode(value: Any, device: str) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(text: Tensor) -> Any:
    return json.loads(bytes(text.cpu().numpy()).decode())


def _check(length: int) -> None:
    if not 0 < length <= LIMIT:
        raise RuntimeError(f"a message of {length} bytes came where at most {LIMIT} are sent: the ranks disagree")
