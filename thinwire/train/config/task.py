"""`[task]` of run.toml: what is learnt, and what the other sections must say for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import UsageError
from thinwire.train.config.families import FAMILIES, TASKS, names_for
from thinwire.train.config.fields import key, list_of, one_of, text

TABLES = ("tsv", "csv")
FORMATS = ("text", "jsonl", "datasets", *TABLES)  # of `[data]`


@dataclass(frozen=True)
class TaskConfig:
    """What is learnt: the next token (a language model), or the label of a text or a pair of texts (an encoder)."""

    kind: str = key("causal", one_of(*TASKS), "causal: the next token; classify: a label per text or pair of texts")
    labels: tuple[str, ...] | None = key(
        None, list_of(text()), "of classify, in the order of the head's outputs; default: all found", ("no", "yes")
    )

    def __post_init__(self) -> None:
        if self.labels is not None and len({*self.labels}) < max(2, len(self.labels)):
            raise UsageError(f"[task] labels = {list(self.labels)}: takes two or more, all different")


def check_columns(columns: Sequence[str | int] | None, label: str | int) -> None:
    """`[data] columns` and `label`: one text or two, and all by name or all by number."""
    if columns is not None and not 1 <= len(columns) <= 2:
        raise UsageError(f"[data] columns = {list(columns)}: takes one column of text, or two")
    if columns is not None and len({type(name) for name in (*columns, label)}) > 1:
        raise UsageError(f"[data] columns = {list(columns)}, label = {label!r}: take names for all, or numbers for all")


def check_task(
    task: TaskConfig, model: str | None, paths: Sequence[str], form: str, columns: Sequence[str | int] | None
) -> None:
    """UsageError where the rest of the configuration is for another kind of task.

    model: `[model] type`, None where a file says it. paths, form, columns: of `[data]`.
    """
    classify = task.kind == "classify"
    if model is not None and FAMILIES[model].task != task.kind:
        allowed = ", ".join(names_for(task.kind))
        raise UsageError(f'[model] type = "{model}": [task] kind = "{task.kind}" takes {allowed}')
    if classify and not paths:
        raise UsageError('[data] paths: [task] kind = "classify" needs files with texts and labels')
    if classify and form == "text":
        raise UsageError(
            '[data] format = "text": has no labels; [task] kind = "classify" takes tsv, csv, jsonl, datasets'
        )
    wrong = {
        "[task] labels": task.labels is not None,
        "[data] columns": columns is not None,
        f'[data] format = "{form}"': form in TABLES,
    }
    for name, given in wrong.items():
        if given and not classify:
            raise UsageError(f'{name}: is for [task] kind = "classify"')
