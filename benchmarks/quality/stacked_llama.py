"""A Llama of which several copies train side by side, with the weights and the names of transformers' LlamaForCausalLM.

All weights lie one after the other in the order of `shapes`, so that a layer's three projections of attention, and the
two of its gate, are one product each. Tied embeddings, no biases, no dropout.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
TOKENS, WEIGHTS = "tokens.xz", "weights.pt"
_FIRST: list[Tensor] = []  # of this process
JOINED = ("k_proj.weight", "v_proj.weight", "up_proj.weight")  # in the product of the parameter before
END = 0  # SmolLM2's <|endoftext|>, between files


@dataclass(frozen=True)
class Llama:
    """Sizes, those of SmolLM2-135M unless given. length: tokens per sequence. pretrained: weights are those that
    `keep` wrote beside the text, for every seed; otherwise at random."""

    width: int = 576
    layers: int = 30
    heads: int = 9
    groups: int = 3  # heads of keys and values
    inside: int = 1536
    vocabulary: int = 49152
    theta: float = 1e5
    epsilon: float = 1e-5
    length: int = 256
    pretrained: bool = False

    at_once: ClassVar[int] = 16  # sequences that are evaluated together
    looks: ClassVar[int] = 10  # evaluations on the way

    @property
    def head(self) -> int:
        """Values of a head."""
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's, by transformers' name."""
        d, kv, inside = self.width, self.groups * self.head, self.inside
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, d)}
        for i in range(self.layers):
            parts = {
                "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
                "self_attn.o_proj": (d, d), "mlp.gate_proj": (inside, d), "mlp.up_proj": (inside, d),
                "mlp.down_proj": (d, inside), "input_layernorm": (d,), "post_attention_layernorm": (d,),
            }  # fmt: skip
            out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts.items()}
        return out | {"model.norm.weight": (d,)}

    def parameters(self) -> int:
        """How many values all of them have."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def initial(self, seed: int) -> Tensor:
        """float32[parameters]."""
        if self.pretrained:
            return _FIRST[0]
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=generator)
                 for shape in self.shapes().values()]  # fmt: skip
        return torch.cat([part.view(-1) for part in parts])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """What the forward pass multiplies by, of flat[copies, parameters], whose memory it shares: the name of the
        first parameter of each product, and [copies, rows, columns] or [copies, 1, width]."""
        found: dict[str, tuple[int, int, int]] = {}  # from, to, columns
        last, start = "", 0
        for name, shape in self.shapes().items():
            end = start + math.prod(shape)
            if name.endswith(JOINED):
                found[last] = (found[last][0], end, shape[-1])
            else:
                last, found[name] = name, (start, end, shape[-1])
            start = end
        return {name: flat[:, a:b].unflatten(1, (-1, columns)) for name, (a, b, columns) in found.items()}

    def read(self, folder: Path) -> tuple[Tensor, Tensor]:
        """(tokens to train on, held-out ones) of a folder; its weights are what `initial` gives from now on."""
        if self.pretrained:
            _FIRST[:] = [torch.load(folder / WEIGHTS, weights_only=True)]
        return read_tokens(folder / TOKENS)

    def starts(self, text: Tensor, seed: int, steps: int, sites: int, per_site: int, apart: bool) -> Tensor:
        """int64[steps, sites, per site]: where sequences begin; none comes twice. The same for any number of sites,
        unless they are `apart`: then each draws from a part of the text of its own, which are other packages."""
        generator = torch.Generator().manual_seed(seed)
        parts = sites if apart else 1
        part = (text.numel() - 1) // self.length // parts
        wanted = steps * sites * per_site // parts
        if wanted > part:
            raise SystemExit(f"{part} sequences of {self.length} in a part of the text, {wanted} wanted")
        drawn = [torch.randperm(part, generator=generator)[:wanted] + i * part for i in range(parts)]
        if apart:
            return self.length * torch.stack(drawn).view(sites, steps, per_site).transpose(0, 1)
        return self.length * drawn[0].view(steps, sites, per_site)

    def losses(self, weights: Weights, rows: Tensor) -> Tensor:
        """float32[copies]: every copy's mean loss on its own rows, int64[copies, sequences, length + 1]."""
        x, target = rows[:, :, :-1], rows[:, :, 1:]
        copies = x.shape[0]
        table = weights["model.embed_tokens.weight"]
        h = _Looked.apply(table, x.reshape(copies, -1))
        turn = _angles(x.shape[2], self.head, self.theta, h.dtype, h.device)
        for i in range(self.layers):
            h = self._layer(h, weights, f"model.layers.{i}.", x.shape, turn)
        logits = (self._norm(h, weights["model.norm.weight"]) @ table.transpose(1, 2)).float()
        every = F.cross_entropy(logits.view(-1, self.vocabulary), target.reshape(-1), reduction="none")
        return every.view(copies, -1).mean(1)

    def _layer(self, h: Tensor, weights: Weights, name: str, shape: torch.Size, turn: tuple[Tensor, Tensor]) -> Tensor:
        """h: [copies, sequences · length, width]."""
        copies, count, length = shape
        given = self._norm(h, weights[name + "input_layernorm.weight"])
        qkv = given @ weights[name + "self_attn.q_proj.weight"].transpose(1, 2)
        split = qkv.view(copies * count, length, self.heads + 2 * self.groups, self.head).transpose(1, 2)
        qk, v = split.split((self.heads + self.groups, self.groups), 1)
        half = torch.cat((-qk[..., self.head // 2 :], qk[..., : self.head // 2]), -1)
        q, k = (qk * turn[0] + half * turn[1]).split((self.heads, self.groups), 1)
        k, v = (self._shared(part) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        h = h + mixed.reshape(h.shape) @ weights[name + "self_attn.o_proj.weight"].transpose(1, 2)
        given = self._norm(h, weights[name + "post_attention_layernorm.weight"])
        gate, up = (given @ weights[name + "mlp.gate_proj.weight"].transpose(1, 2)).chunk(2, -1)
        return h + (F.silu(gate) * up) @ weights[name + "mlp.down_proj.weight"].transpose(1, 2)

    def _shared(self, part: Tensor) -> Tensor:
        """Every group's keys or values for each of its heads."""
        return part[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2)

    def _norm(self, h: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(h, (self.width,), eps=self.epsilon) * weight


class _Looked(torch.autograd.Function):
    """Rows of every copy's table; their gradients are added in float32.

    table: [copies, vocabulary, width]; places: int64[copies, tokens] → [copies, tokens, width].
    """

    @staticmethod
    def forward(context: Any, table: Tensor, places: Tensor) -> Tensor:
        offsets = torch.arange(table.shape[0], device=table.device)[:, None] * table.shape[1]
        flat = (places + offsets).view(-1)
        context.save_for_backward(flat)
        context.shape, context.kind = table.shape, table.dtype
        return table.reshape(-1, table.shape[2])[flat].view(*places.shape, -1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        copies, count, width = context.shape
        out = torch.zeros(copies * count, width, device=gradient.device)
        out.index_add_(0, context.saved_tensors[0], gradient.reshape(-1, width).float())
        return out.view(context.shape).to(context.kind), None


@cache
def _angles(length: int, head: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, [length, head]."""
    speed = 1.0 / theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), speed).repeat(1, 2)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def keep(gguf: Path, path: Path, size: Llama) -> None:
    """Write the weights of a GGUF file as one flat tensor, in the order of `shapes`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    state, config = model.state_dict(), model.config
    theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    found = (config.num_attention_heads, config.num_key_value_heads, theta, round(config.rms_norm_eps, 9))
    if found != (size.heads, size.groups, size.theta, size.epsilon):
        raise SystemExit(f"{gguf}: heads, groups, theta and epsilon are {found}")
    for name, shape in size.shapes().items():
        if state[name].shape != shape:
            raise SystemExit(f"{gguf}: {name} is {tuple(state[name].shape)}, wanted {shape}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".partial")
    torch.save(torch.cat([state[name].float().reshape(-1) for name in size.shapes()]), part)
    part.rename(path)


# --- text


def pack_tokens(folders: list[Path], gguf: Path, path: Path, limit: int) -> tuple[int, int]:
    """Write the tokens of folders' Python files, package after package; every fiftieth file is held out.

    gguf: whose tokenizer it is. limit: of bytes; where there are more, files are left out evenly. Returns the tokens to
    train on and held out.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    files = [f for folder in folders for f in sorted(folder.rglob("*.py")) if 2000 < f.stat().st_size < 200_000]
    share = min(1.0, limit / sum(f.stat().st_size for f in files))
    files = [f for i, f in enumerate(files) if int((i + 1) * share) > int(i * share)]
    text = [f.read_text() for f in files if f.read_bytes().isascii()]
    tokens = [[*ids, END] for ids in tokenizer(text, add_special_tokens=False)["input_ids"]]
    held = [one for some in tokens[::50] for one in some]
    train = [one for i, some in enumerate(tokens) if i % 50 for one in some]
    body = np.array([*held, *train], dtype="<u2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(len(held).to_bytes(8, "little") + body, preset=1))
    return len(train), len(held)


def read_tokens(path: Path) -> tuple[Tensor, Tensor]:
    """(tokens to train on, held-out ones) of a file that `pack_tokens` wrote, int32."""
    raw = lzma.decompress(path.read_bytes())
    held = int.from_bytes(raw[:8], "little")
    tokens = torch.from_numpy(np.frombuffer(raw[8:], dtype="<u2").astype(np.int32))
    return tokens[held:], tokens[:held]
