"""A frame: 16 bytes that say what a message is, then the codec's bytes.

    0 version   1 kind (flags below)   2–3 send count   4–7 step   8–11 key hash   12–15 checksum (little-endian)

The checksum covers the header and the body; a receiver refuses a frame that is foreign (version, key), stale (step,
count), truncated (length) or damaged (checksum).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.checksum import PRIME, checksum, weight
from thinwire.kernels.random import derive

VERSION = 1
BYTES = 16
WARM, NONFINITE, REFRESH, ROWS = 1, 2, 4, 8
LAYOUT = "<BBHIII"
FIELD_WEIGHT = weight(3)  # of the checksum's own word, which is word 3


@dataclass(frozen=True)
class Header:
    kind: int
    count: int
    step: int
    key: int


def key_hash(key: object) -> int:
    return derive("key", key) % 2**32


def seal(header: Header, body: Tensor) -> Tensor:
    """Header and uint8 body → frame."""
    words = struct.pack(LAYOUT, VERSION, header.kind, header.count % 2**16, header.step % 2**32, header.key, 0)
    head = torch.frombuffer(bytearray(words), dtype=torch.uint8).to(body.device)
    frame = torch.cat((head, body))
    frame[12:BYTES] = _little_endian(checksum(frame))
    return frame


def unseal(frame: Tensor, expected: Header) -> tuple[int, Tensor]:
    """(kind, body) of a frame that is the expected one; `expected.kind` is not compared. Otherwise ValueError."""
    if frame.dtype != torch.uint8 or frame.dim() != 1 or frame.numel() < BYTES:
        raise ValueError(f"a frame is at least {BYTES} bytes of uint8, not {tuple(frame.shape)} {frame.dtype}")
    version, kind, count, step, key, stored = struct.unpack(LAYOUT, bytes(frame[:BYTES].tolist()))
    if version != VERSION:
        raise ValueError(f"frame of version {version}, this is version {VERSION}")
    if stored >= PRIME or (int(checksum(frame)) - stored * FIELD_WEIGHT - stored) % PRIME:
        raise ValueError("frame is damaged (checksum)")
    if key != expected.key:
        raise ValueError("frame belongs to another key")
    if (step, count) != (expected.step % 2**32, expected.count % 2**16):
        raise ValueError(f"frame of step {step}, send {count}; expected step {expected.step}, send {expected.count}")
    return kind, frame[BYTES:]


def join_rows(warm: list[bool], bodies: list[Tensor]) -> Tensor:
    """Body of a per-row frame: a bitmap of the warm rows, then the rows' own bodies."""
    bitmap = bytearray((len(warm) + 7) // 8)
    for i, bit in enumerate(warm):
        bitmap[i // 8] |= bit << (i % 8)
    if not bodies:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat((torch.frombuffer(bitmap, dtype=torch.uint8).to(bodies[0].device), *bodies))


def warm_rows(body: Tensor, rows: int) -> tuple[list[bool], Tensor]:
    """(warm flags, the rest) of a per-row body."""
    size = (rows + 7) // 8
    if body.numel() < size:
        raise ValueError(f"frame is too short for {rows} rows")
    bits = body[:size].tolist()
    return [bool(bits[i // 8] >> (i % 8) & 1) for i in range(rows)], body[size:]


def bitmap_bytes(rows: int) -> int:
    return (rows + 7) // 8


def _little_endian(value: Tensor) -> Tensor:
    """0-d int64 below 2³² → uint8[4], on its device."""
    return ((value >> torch.arange(0, 32, 8, device=value.device)) & 255).to(torch.uint8)
