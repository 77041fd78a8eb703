"""Samples: every token once, ids by content, labels where loss is due; and documents from every source."""

import json
import os
import sys
import types
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.train.config.sections import DataConfig
from thinwire.train.data.documents import files_of, read_documents
from thinwire.train.data.samples import IGNORED, Samples, make_samples
from thinwire.train.data.tokenizer import ByteTokenizer, CheckpointTokenizer, open_tokenizer

BYTES = ByteTokenizer()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tokenizer as a checkpoint holds it: words, specials, a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "<user>", "<assistant>", "hello", "world", "yes", "no"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    fast.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return str(folder)


def written(folder, *texts: str, **options) -> Samples:
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_bytes(text.encode())
    return make_samples(DataConfig(paths=(str(folder),), **options), BYTES)


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5),
    seq_len=st.integers(2, 17),
    packing=st.booleans(),
)
def test_every_token_is_a_label_once(tmp_path_factory, texts, seq_len, packing) -> None:
    """In order, every token but the first (of the stream, or of each document) is the label of one position."""
    samples = written(tmp_path_factory.mktemp("d"), *texts, seq_len=seq_len, packing=packing, held_out=0.0)
    documents = [[*text.encode(), BYTES.end] for text in texts]
    streams = [[token for document in documents for token in document]] if packing else documents
    inputs, labels = samples.rows(range(len(samples)))
    assert inputs.shape == labels.shape == (len(samples), seq_len)
    counted = labels != IGNORED
    assert labels[counted].tolist() == [token for stream in streams for token in stream[1:]]
    assert inputs[counted].tolist() == [token for stream in streams for token in stream[:-1]]
    assert (inputs[~counted] == BYTES.pad).all()
    assert samples.labelled(range(len(samples))) == counted.sum()


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["abc", "abd", "x" * 9, "yy"]), min_size=1, max_size=12))
def test_ids_come_from_content_and_copies_have_their_own(tmp_path_factory, texts) -> None:
    folder = tmp_path_factory.mktemp("d")
    samples = written(folder, *texts, seq_len=4, packing=False, held_out=0.5)
    assert len(set(samples.ids.tolist())) == len(samples) and (samples.ids >= 0).all()
    again = written(folder, *texts, seq_len=4, packing=False, held_out=0.5)
    assert (again.ids == samples.ids).all() and again.digest == samples.digest
    rows = [tuple(row) for row in samples.rows(range(len(samples)))[0].tolist()]
    sides: dict[tuple[int, ...], set[bool]] = {}
    for number, row in enumerate(rows):
        sides.setdefault(row, set()).add(number in samples.held_out)
    assert all(len(side) == 1 for side in sides.values()), "a content is on one side only"
    assert sorted([*samples.train, *samples.held_out]) == list(range(len(samples)))
    backwards = written(tmp_path_factory.mktemp("d"), *texts[::-1], seq_len=4, packing=False)
    assert set(backwards.ids.tolist()) == set(samples.ids.tolist()), "ids do not depend on the order of files"


def test_more_data_leaves_the_ids_before_it_alone(tmp_path) -> None:
    before = written(tmp_path, "a" * 50, "b" * 50, seq_len=8)
    after = written(tmp_path, "a" * 50, "b" * 50, "c" * 50, seq_len=8)
    whole = len(before) - 1  # the last, short sample goes on now
    assert (after.ids[:whole] == before.ids[:whole]).all()
    assert before.digest != after.digest


def test_held_out_share_and_limit(tmp_path) -> None:
    text = "".join(map(chr, np.random.default_rng(0).integers(33, 120, 40_000)))
    samples = written(tmp_path, text, seq_len=10, held_out=0.25)
    assert abs(len(samples.held_out) / len(samples) - 0.25) < 0.03
    few = written(tmp_path, text, seq_len=10, held_out=0.25, samples=100)
    assert len(few) == 100 and (few.ids == samples.ids[:100]).all()
    assert (few.held_out == samples.held_out[: len(few.held_out)]).all()
    assert not len(written(tmp_path, text, seq_len=10, held_out=0.0).held_out)


def test_chat_turns_are_scored_where_the_assistant_speaks(tmp_path) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n\n" + json.dumps({"text": "T"}) + "\n")
    samples = make_samples(DataConfig(paths=(str(tmp_path / "a.jsonl"),), seq_len=32, held_out=0.0), BYTES)
    inputs, labels = samples.rows([0])
    end = BYTES.end
    assert inputs[0, :12].tolist() == [259, 104, 105, end, 260, 121, 111, end, 259, 63, end, 84]
    assert labels[labels != IGNORED].tolist() == [121, 111, end, 84, end]
    assert labels[0, 4:7].tolist() == [121, 111, end]


def test_a_sample_without_a_label_is_left_out(tmp_path) -> None:
    lines = [{"messages": [{"role": "user", "content": "x" * 20}]}, {"text": "kept"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    samples = make_samples(DataConfig(paths=(str(tmp_path),), seq_len=8, packing=False), BYTES)
    assert len(samples) == 1


def test_checkpoint_tokenizer(checkpoint) -> None:
    tokenizer = CheckpointTokenizer(checkpoint)
    assert tokenizer.size == 8 and tokenizer.pad == 1
    assert tokenizer.text("hello world")[0].tolist() == [4, 5, 1]
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes yes"},
        {"role": "user", "content": "world"},
        {"role": "assistant", "content": "no"},
    ]
    tokens, mask = tokenizer.chat(turns)
    assert tokens.tolist() == [2, 4, 1, 3, 6, 6, 1, 2, 5, 1, 3, 7, 1]
    assert np.flatnonzero(mask).tolist() == [4, 5, 6, 11, 12], "what it says and its end, not its name"


def test_which_tokenizer(checkpoint, tmp_path) -> None:
    assert isinstance(open_tokenizer("auto", None), ByteTokenizer)
    assert isinstance(open_tokenizer("bytes", checkpoint), ByteTokenizer)
    assert isinstance(open_tokenizer("auto", checkpoint), CheckpointTokenizer)
    assert isinstance(open_tokenizer(checkpoint, None), CheckpointTokenizer)
    with pytest.raises(UsageError, match="no tokenizer that transformers can read"):
        open_tokenizer("auto", str(tmp_path))


def test_a_template_that_rewrites_earlier_turns_is_refused(checkpoint) -> None:
    tokenizer = CheckpointTokenizer(checkpoint)
    closing = "{% if not add_generation_prompt %}world{% endif %}"
    for template in ("{% for m in messages %}hello {% endfor %}" + TEMPLATE, TEMPLATE + closing):
        tokenizer._inner.chat_template = template
        with pytest.raises(UsageError, match="rewrites earlier turns; cannot mask turn 1"):
            tokenizer.chat([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}] * 2)
    tokenizer._inner.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="the chat template refuses these turns: roles must alternate"):
        tokenizer.chat([{"role": "user", "content": "hello"}])
    tokenizer._inner.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


def test_folders_are_read_in_order_of_names(tmp_path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden", ".git/config", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "j"}' if name.endswith("jsonl") else name)
    (tmp_path / "empty.txt").write_text("")
    texts = [document.text for document in read_documents(DataConfig(paths=(str(tmp_path),)))]
    assert texts == ["a/z.md", "b.txt", "j"]
    texts = [document.text for document in read_documents(DataConfig(paths=(str(tmp_path),), format="text"))]
    assert texts == ["a/z.md", "b.txt", '{"text": "j"}']


def test_without_paths_the_standard_library_up_to_a_size() -> None:
    small, large = (list(read_documents(DataConfig(corpus_bytes=n))) for n in (10_000, 300_000))
    assert sum(len(d.text.encode()) for d in small) == 10_000
    assert [d.where for d in small] == [d.where for d in large][: len(small)] == sorted(d.where for d in small)
    assert small[0].text.startswith(large[0].text[:100]) and "import" in large[0].text


def test_tests_and_installed_packages_are_no_part_of_the_library(tmp_path, monkeypatch) -> None:
    for name in ("b.py", "a/c.py", "test/d.py", "a/tests/e.py", "site-packages/f.py", "a/g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [d.text for d in read_documents(DataConfig())] == ["a/c.py", "b.py"]


class Rows(list):
    """Stands for a data set: rows, and what is known of their columns."""

    features: ClassVar[dict[str, object]] = {}


def test_a_data_set_on_disk(tmp_path, monkeypatch) -> None:
    """With a stand-in for the package, which is not a dependency."""
    (tmp_path / "dataset_dict.json").write_text("{}")
    config = DataConfig(paths=(str(tmp_path),))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="needs the package datasets"):
        list(read_documents(config))
    stand_in = types.ModuleType("datasets")
    rows = Rows([{"text": "one"}, {"text": "two"}])
    stand_in.load_from_disk = lambda path: {"train": rows, "test": Rows()}
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert [document.text for document in read_documents(config)] == ["one", "two"]
    stand_in.load_from_disk = lambda path: {"validation": []}
    with pytest.raises(UsageError, match="no split named train; it has validation"):
        list(read_documents(config))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n{"text": ', r"a.jsonl:2: not JSON"),
        (b"[1]", r"a.jsonl:1: must be an object with 'text' or 'messages'"),
        (b'{"body": "a"}', r"a.jsonl:1: neither text 'text' nor turns 'messages'; it has 'body'"),
        (b'{"messages": []}', r"a.jsonl:1: 'messages' must be a list of"),
        (b'{"messages": [{"role": "user"}]}', r"a.jsonl:1: 'messages' must be a list of"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', r"a.jsonl:1: role 'robot': allowed are system, user"),
        (b'{"text": "\\ud800"}', r"a.jsonl:1: not Unicode text \(character 0\)"),
        (b"\xff\xfe", r"a.jsonl: not UTF-8 text \(byte 0\)"),
        (b"", r"nothing to train on: no document"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', r"nothing to train on: no document has two tokens"),
    ],
)
def test_mistakes_in_files_name_the_place(content, said, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        make_samples(DataConfig(paths=(str(tmp_path / "a.jsonl"),)), BYTES)


def test_missing_and_empty_folders(tmp_path) -> None:
    with pytest.raises(UsageError, match="the folder holds no file"):
        list(read_documents(DataConfig(paths=(str(tmp_path),))))
    with pytest.raises(UsageError, match="no such file or folder"):
        list(read_documents(DataConfig(paths=(str(tmp_path / "no"),))))


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """Not one that is passed over: samples would be missing without a word."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    assert [file.name for file in files_of(tmp_path)] == ["a.txt", "b.txt"]
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("inner"):
            raise OSError(24, "Too many open files", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match=r"cannot read .*inner: Too many open files"):
        files_of(tmp_path)
