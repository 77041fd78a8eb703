"""Text to numbers: bytes with a few specials, or the tokenizer of a checkpoint. Chat turns with a loss mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import UsageError
from thinwire.train.foreign_code import refuse_own_code

Turns = Sequence[Mapping[str, Any]]  # {"role": "user", "content": "…"}, as in a chat template
Coded = tuple[NDArray[np.int64], NDArray[np.bool_]]  # tokens; where loss is taken on them
Ints = NDArray[np.int64]
ROLES = ("system", "user", "assistant")


class Tokenizer(Protocol):
    """`size` ids in all; `pad` fills short samples (its label is never taken)."""

    size: int
    pad: int

    def text(self, text: str) -> Coded:
        """A document with its end token; loss on all of it."""

    def chat(self, turns: Turns) -> Coded:
        """A conversation; loss on the assistant's turns, their end tokens included."""

    def pairs(self, rows: Sequence[Sequence[str]], length: int) -> list[tuple[Ints, Ints]]:
        """Of every row, which is one text or two: its tokens as an encoder takes them, at most `length`, and for each
        token whether it belongs to the first text (1) or the second (2)."""


class ByteTokenizer:
    """UTF-8 bytes 0…255, then pad, end, and a mark for each role: `<user> bytes <end> <assistant> bytes <end>`.
    For an encoder: `<start> bytes <end> bytes <end>`."""

    pad, end, start = 256, 257, 261
    size = 264  # two ids are left free

    def text(self, text: str) -> Coded:
        tokens = np.append(_bytes(text), self.end)
        return tokens, np.ones(len(tokens), bool)

    def chat(self, turns: Turns) -> Coded:
        tokens, mask = [], []
        for turn in turns:
            if turn["role"] not in ROLES:
                raise UsageError(f"role {turn['role']!r}: allowed are {', '.join(ROLES)}")
            content = np.append(_bytes(turn["content"]), self.end)
            tokens += [np.array([258 + ROLES.index(turn["role"])]), content]
            mask += [np.zeros(1, bool), np.full(len(content), turn["role"] == "assistant")]
        return np.concatenate(tokens), np.concatenate(mask)

    def pairs(self, rows: Sequence[Sequence[str]], length: int) -> list[tuple[Ints, Ints]]:
        return [self._pair(texts, length) for texts in rows]

    def _pair(self, texts: Sequence[str], length: int) -> tuple[Ints, Ints]:
        """Where they are too long together, the longer one is cut."""
        parts = [_bytes(text) for text in texts]
        over = sum(map(len, parts)) + 1 + len(parts) - length
        for _ in range(over):  # the longer one gives a byte
            longest = max(range(len(parts)), key=lambda i: len(parts[i]))
            parts[longest] = parts[longest][:-1]
        ended = [np.append(part, self.end) for part in parts]
        tokens = np.concatenate([[self.start], *ended])
        return tokens, np.concatenate([[1], *(np.full(len(part), i + 1) for i, part in enumerate(ended))])


class CheckpointTokenizer:
    """The tokenizer saved beside a checkpoint, with its own special tokens and chat template.

    ends: documents end with a token of their own, so one without an end-of-text token is refused.
    """

    def __init__(self, folder: str | Path, ends: bool = True) -> None:
        from transformers import AutoTokenizer

        refuse_own_code(folder)
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0]
            raise UsageError(
                f"{folder}: no tokenizer that transformers can read ({line}); [data] tokenizer may name another "
                "folder, or bytes"
            ) from None
        self._inner.model_max_length = 2**60  # documents are cut into samples here, not there
        self.folder, self.size = Path(folder), len(self._inner)
        self.end = self._inner.eos_token_id
        if self.end is None and ends:
            raise UsageError(f"{folder}: the tokenizer has no end-of-text token")
        self.pad = self.end if self._inner.pad_token_id is None else self._inner.pad_token_id
        if self.pad is None:
            raise UsageError(f"{folder}: the tokenizer has no padding token")

    def text(self, text: str) -> Coded:
        """With what the tokenizer puts before a text (Llama: a begin token), and one end token after it."""
        tokens = self._inner(text)["input_ids"]
        if not tokens or tokens[-1] != self.end:
            tokens = [*tokens, self.end]
        return np.array(tokens, np.int64), np.ones(len(tokens), bool)

    def chat(self, turns: Turns) -> Coded:
        if not self._inner.chat_template:
            raise UsageError(f"{self.folder}: the tokenizer has no chat template; use text records, or tokenizer bytes")
        tokens = self._render(turns)
        mask = np.zeros(len(tokens), bool)
        for i, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before, after = self._render(turns[:i], prompt=True), self._render(turns[: i + 1])
                if tokens[: len(before)] != before or tokens[: len(after)] != after:
                    raise UsageError(f"{self.folder}: the chat template rewrites earlier turns; cannot mask turn {i}")
                mask[len(before) : len(after)] = True
        return np.array(tokens, np.int64), mask

    def pairs(self, rows: Sequence[Sequence[str]], length: int) -> list[tuple[Ints, Ints]]:
        """As the tokenizer joins them; where they are too long together, the longer one is cut."""
        columns = [list(column) for column in zip(*rows)]
        coded = self._inner(*columns, truncation="longest_first", max_length=length, return_token_type_ids=True)
        found = zip(coded["input_ids"], coded["token_type_ids"])
        return [(np.array(tokens, np.int64), 1 + np.array(kinds, np.int64)) for tokens, kinds in found]

    def _render(self, turns: Turns, prompt: bool = False) -> list[int]:
        """Through text, so that a template's specials are read once, and every prefix the same way."""
        from jinja2 import TemplateError

        try:
            text = self._inner.apply_chat_template([*turns], tokenize=False, add_generation_prompt=prompt)
        except TemplateError as error:  # roles that do not alternate, no user's turn first, …
            raise UsageError(f"the chat template refuses these turns: {error}") from None
        return list(self._inner(text, add_special_tokens=False)["input_ids"])


def open_tokenizer(name: str, checkpoint: str | None, ends: bool = True) -> Tokenizer:
    """`[data] tokenizer`: "auto" is the checkpoint's where there is one, else bytes; or a folder. ends: documents are
    to end with a token of their own."""
    if name == "auto":
        name = checkpoint or "bytes"
    return ByteTokenizer() if name == "bytes" else CheckpointTokenizer(name, ends)


def _bytes(text: str) -> NDArray[np.int64]:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)
