"""A frame: 16 bytes that say what a message is, then the codec's bytes.

    0 version   1 kind (flags below)   2–3 send count   4–7 step   8–11 key hash   12–15 checksum (little-endian)

The checksum covers the header and the body; a receiver refuses a frame that is foreign (version, key), stale (step,
count), truncated (length) or damaged (checksum).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.kernels.checksum import PRIME, checksum, weight
from thinwire.kernels.dispatch import choose, load
from thinwire.kernels.random import derive

VERSION = 2
BYTES = 16
WARM = 1  # a change against a mirror
NONFINITE = 2  # no content: NaN or Inf would have been sent
REFRESH = 4  # x follows in full
ROWS = 8  # a key per row; the body ends in a bitmap of the warm ones
LAYOUT = "<BBHIII"
FIELD_WEIGHT = weight(3)  # of the checksum's own word, which is word 3


@dataclass(frozen=True)
class Header:
    """What a frame says it is. kind: flags (WARM …). count: the key's messages in this step before it. step: the
    step's number. key: the hash of its key."""

    kind: int
    count: int
    step: int
    key: int


def key_hash(key: object) -> int:
    """32 bits for a key, or a tuple of keys."""
    return derive("key", key) % 2**32


def seal(header: Header, frame: Tensor, finite: Tensor | None = None, impl: str | None = None) -> Tensor:
    """Write the header before the body that `frame` (uint8) holds from byte 16 on. `finite`, 0-d bool on the frame's
    device, sets NONFINITE where it is false, without the host reading it."""
    if choose(frame, impl) == "gpu":
        load("gpu", "seal").seal(frame, _words(header), NONFINITE << 8, finite)
        return frame
    frame[:BYTES] = from_host(_pack(header), frame.device)
    if finite is not None:
        frame[1] += NONFINITE * ~finite
    frame[12:BYTES] = _little_endian(checksum(frame))
    return frame


def unseal(frame: Tensor, expected: Header) -> tuple[int, Tensor]:
    """(kind, body) of a frame that is the expected one; `expected.kind` is not compared. Otherwise ValueError."""
    _check_length(frame)
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


def inspect(frame: Tensor, expected: Header, impl: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(is it the expected one, is its content finite, body), the first two 0-d bools on the frame's device: `unseal`
    without the host reading anything. `expected.kind` is compared too."""
    _check_length(frame)
    if choose(frame, impl) == "gpu":
        good, finite = load("gpu", "seal").inspect(frame, _words(expected), NONFINITE << 8)
        return good, finite, frame[BYTES:]
    said = frame[:12] == from_host(_pack(expected)[:12], frame.device)
    flagged = frame[1] == expected.kind | NONFINITE
    said[1] |= flagged
    stored = (frame[12:BYTES].long() << _shifts(frame.device)).sum()
    high = (stored >> 16) * (FIELD_WEIGHT + 1) % PRIME  # 32 × 32 bits overflow int64: in halves
    own = ((high << 16) + (stored & 0xFFFF) * (FIELD_WEIGHT + 1)) % PRIME
    return said.all() & (stored < PRIME) & (checksum(frame) == own), ~flagged, frame[BYTES:]


def write_warm(warm: list[bool], body: Tensor) -> None:
    """The end of a per-row body: a bitmap of the warm rows."""
    body[body.numel() - bitmap_bytes(len(warm)) :] = _known(_bitmap(warm), body.device)


def warm_rows(body: Tensor, rows: int) -> list[bool]:
    """Which of so many rows a body says are warm. Waits for a card."""
    bits = _bitmap_of(body, rows).tolist()
    return [bool(bits[i // 8] >> (i % 8) & 1) for i in range(rows)]


def has_warm_rows(body: Tensor, warm: list[bool]) -> Tensor:
    """0-d bool on the body's device: are these its warm rows?"""
    return (_bitmap_of(body, len(warm)) == _known(_bitmap(warm), body.device)).all()


def bitmap_bytes(rows: int) -> int:
    """Length of the bitmap of so many rows."""
    return (rows + 7) // 8


def from_host(data: bytes, device: torch.device) -> Tensor:
    """uint8 on a device; on its way to a card through pinned memory, so that the host does not wait."""
    there = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return there if device.type != "cuda" else there.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _known(data: bytes, device: torch.device) -> Tensor:
    """Bytes that come again and again, on a device; there when this returns, for every stream. Do not write into it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _pack(header: Header) -> bytes:
    return struct.pack(LAYOUT, VERSION, header.kind, header.count % 2**16, header.step % 2**32, header.key, 0)


def _words(header: Header) -> tuple[int, int, int]:
    """The header's 32-bit words before the checksum."""
    return struct.unpack("<3I", _pack(header)[:12])


def _check_length(frame: Tensor) -> None:
    if frame.dtype != torch.uint8 or frame.dim() != 1 or frame.numel() < BYTES:
        raise ValueError(f"a frame is at least {BYTES} bytes of uint8, not {tuple(frame.shape)} {frame.dtype}")


def _bitmap(warm: list[bool]) -> bytes:
    bits = bytearray(bitmap_bytes(len(warm)))
    for i, bit in enumerate(warm):
        bits[i // 8] |= bit << (i % 8)
    return bytes(bits)


def _bitmap_of(body: Tensor, rows: int) -> Tensor:
    start = body.numel() - bitmap_bytes(rows)
    if start < 0:
        raise ValueError(f"frame is too short for {rows} rows")
    return body[start:]


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 8, device=device)


def _little_endian(value: Tensor) -> Tensor:
    """0-d int64 below 2³² → uint8[4], on its device."""
    return ((value >> _shifts(value.device)) & 255).to(torch.uint8)
