"""`[task] kind = "classify"`: labelled texts from files, their scores, and a run on real processes."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_launch import launch, on_a_network
from train_ranks import gradients, several, trained_and_gradients

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.lab import Network
from thinwire.train.config.sections import DataConfig, TrainConfig, read_config
from thinwire.train.data.batches import Batches, held_out_batches
from thinwire.train.data.examples import make_examples
from thinwire.train.data.records import read_records
from thinwire.train.data.tokenizer import ByteTokenizer, open_tokenizer
from thinwire.train.metrics import read_events
from thinwire.train.task.scores import Scores, matthews, summary

GOOD, BAD = ("fine", "great", "lovely", "warm"), ("dull", "poor", "cold", "sad")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "film", "it", "was", *GOOD, *BAD, *map(str, range(40))]
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """BERT's kind of tokenizer, of a few words: `[CLS] a [SEP] b [SEP]`, with no end-of-text token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.processors import BertProcessing
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]")
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return str(folder)


def pairs(count: int) -> list[tuple[str, str, str]]:
    """Two sentences that agree in tone, and their label."""
    rng = random.Random(1)
    tones = [rng.choice(("good", "bad")) for _ in range(count)]
    words = {"good": GOOD, "bad": BAD}
    return [(f"film {rng.choice(words[t])} {i % 40}", f"it was {rng.choice(words[t])}", t) for i, t in enumerate(tones)]


def write_tsv(file: Path, count: int) -> str:
    lines = ["number\tfirst\tsecond\ttone", *(f"{i}\t{a}\t{b}\t{c}" for i, (a, b, c) in enumerate(pairs(count)))]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


# --- data


def test_every_format_gives_the_same_samples(tmp_path, monkeypatch) -> None:
    rows = [('a "b" c', "d,e", 1), ("f", "g", 0), ("h\ti", "j", 1)]
    named = [{"x": a, "y": b, "label": c} for a, b, c in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    (tmp_path / "a.csv").write_text('label,y,x\n1,"d,e","a ""b"" c"\n0,g,f\n1,j,"h\ti"\n')
    (tmp_path / "marked.csv").write_text("\ufeff" + (tmp_path / "a.csv").read_text())  # as spreadsheets write it
    (tmp_path / "plain.csv").write_text('1,"d,e","a ""b"" c"\n0,g,f\n1,j,"h\ti"\n')
    (tmp_path / "a.tsv").write_text('label\ty\tx\r\n1\td,e\ta "b" c\r\n0\tg\tf\r\n')
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    stand_in = types.ModuleType("datasets")

    class Rows(list):
        features: ClassVar[dict[str, object]] = {"label": types.SimpleNamespace(names=["0", "1"]), "x": object()}

    stand_in.load_from_disk = lambda path: Rows(named)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)

    def made(name: str, columns=("x", "y"), label="label", **more):
        config = DataConfig(paths=(str(tmp_path / name),), columns=columns, label=label, seq_len=16, **more)
        return make_examples(config, BYTES, None)

    expected = made("a.jsonl")
    assert expected.names == ("0", "1") and expected.labels.tolist() == [1, 0, 1]
    for name in ("a.csv", "marked.csv", "set"):
        assert made(name).digest == expected.digest, name
    assert made("plain.csv", columns=(2, 1), label=0).digest == expected.digest
    assert made("a.tsv").ids.tolist() == expected.ids[:2].tolist(), "a TSV has no quotes"
    assert made("a.jsonl", samples=2).ids.tolist() == expected.ids[:2].tolist()


def test_samples_are_padded_and_their_segments_tell(tokenizer, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"x": "film was fine", "y": "it was great", "label": "b"}\n{"x": "sad", "y": "it", "label": "a"}\n'
    )
    config = DataConfig(paths=(str(tmp_path / "a.jsonl"),), columns=("x", "y"), seq_len=8)
    made = make_examples(config, open_tokenizer(tokenizer, None, ends=False), None)
    inputs, labels = made.rows([0, 1, -1])
    segments = made.segments([0, 1, -1])
    words = [[WORDS[i] for i in row] for row in inputs.tolist()]
    assert words[0] == ["[CLS]", "film", "was", "[SEP]", "it", "was", "great", "[SEP]"], "the longer one is cut"
    assert words[1] == ["[CLS]", "sad", "[SEP]", "it", "[SEP]", "[PAD]", "[PAD]", "[PAD]"]
    assert segments.tolist() == [[1] * 4 + [2] * 4, [1, 1, 1, 2, 2, 0, 0, 0], [1] + [0] * 7]
    assert labels.tolist() == [1, 0, -100] and made.labelled([0, -1]) == 1


def test_a_text_is_on_one_side_whatever_its_label(tmp_path) -> None:
    lines = [f'{{"text": "t{i}", "label": {label}}}\n' for i in range(60) for label in (0, 1)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    config = DataConfig(paths=(str(tmp_path / "a.jsonl"),), seq_len=8, held_out=0.3)
    made = make_examples(config, BYTES, None)
    sides = {number: side for side in ("train", "held_out") for number in getattr(made, side).tolist()}
    assert len({*made.ids.tolist()}) == 120 and 0 < len(made.held_out) < 120
    assert all(sides[2 * i] == sides[2 * i + 1] for i in range(60))
    taken = list(held_out_batches(made, 16))
    assert sum(int((batch.labels >= 0).sum()) for batch in taken) == len(made.held_out)
    first = Batches(made, 8, seed=0).next()
    assert [part.ids.tolist() for part in first.split(2)] == first.ids.view(2, 4).tolist()
    assert all(part.segments.shape == (4, 8) and part.labels.shape == (4,) for part in first.split(2))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tsv", "text\tlabel\nx\t1\ty\n", r"a.tsv: row 2 has 3 values, the first line has 2 names"),
        ("a.tsv", "sentence\tlabel\nx\t1\n", r"row 2: no column 'text' \(\[data\] columns, label\); it has 'sentence'"),
        ("a.txt", "x", r"a.txt: tsv, csv or jsonl\? its suffix does not say"),
        ("a.jsonl", '{"text": 3, "label": 1}', r"a.jsonl:1: 'text' is 3, and no text"),
        (
            "a.jsonl",
            '{"text": "x", "label": 0.5}',
            r"a.jsonl:1: the label 'label' is 0.5: allowed is a text or a whole",
        ),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}', r"a.jsonl:1: not Unicode text \(character 0\)"),
        ("a.jsonl", '{"text": "x", "label": 1}', r"all 1 records have the label '1'"),
        ("a.jsonl", "", r"nothing to train on: no record"),
    ],
)
def test_mistakes_in_files_name_the_place(name, content, said, tmp_path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said):
        make_examples(DataConfig(paths=(str(tmp_path / name),)), BYTES, None)


def test_the_order_of_labels(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": 10}\n{"text": "y", "label": 9}\n')
    config = DataConfig(paths=(str(tmp_path / "a.jsonl"),))
    assert [record.label for record in read_records(config)] == ["10", "9"]
    assert make_examples(config, BYTES, None).names == ("9", "10"), "numbers by value"
    assert make_examples(config, BYTES, None, known=["10", "9"]).names == ("10", "9"), "a checkpoint's order"
    assert make_examples(config, BYTES, ["0", "9", "10"]).labels.tolist() == [2, 1]
    with pytest.raises(UsageError, match=r"a.jsonl:2: the label '9' is not among \[task\] labels = \['10', 'x'\]"):
        make_examples(config, BYTES, ["10", "x"])


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"task": {"kind": "classify"}}, r'\[model\] type = "llama": \[task\] kind = "classify" takes bert, roberta'),
        ({"model": {"type": "bert"}}, r'\[model\] type = "bert": \[task\] kind = "causal" takes llama, qwen2'),
        ({"task": {"labels": ["a", "b"]}}, r'\[task\] labels: is for \[task\] kind = "classify"'),
        ({"data": {"columns": ["a"], "format": "tsv"}}, r'\[data\] columns: is for \[task\] kind = "classify"'),
        ({"data": {"format": "tsv"}}, r'\[data\] format = "tsv": is for \[task\] kind = "classify"'),
        ({"data": {"columns": ["a", "b", "c"]}}, r"takes one column of text, or two"),
        ({"data": {"columns": ["a", 1]}}, r"take names for all, or numbers for all"),
        ({"task": {"labels": ["a", "a"]}}, r"takes two or more, all different"),
        ({"task": {"kind": "classify"}, "model": {"type": "bert"}}, r"\[data\] paths: .* needs files with texts"),
    ],
)
def test_mistakes_in_the_configuration(document, said) -> None:
    with pytest.raises(UsageError, match=said):
        read_config(document)


# --- scores


def test_matthews_is_the_correlation_of_two_classes() -> None:
    """For two classes it is Pearson's correlation of the 0/1 labels and predictions."""
    torch.manual_seed(0)
    labels, predicted = torch.randint(0, 2, (2, 50))
    scores = Scores(2, torch.device("cpu"))
    logits = torch.nn.functional.one_hot(predicted, 2).float()
    scores.add(torch.cat((logits, logits[:1])), torch.cat((labels, torch.tensor([-100]))))
    found = summary(scores.take())
    pearson = torch.corrcoef(torch.stack((labels, predicted)).double())[0, 1]
    assert (
        found["matthews"] == pytest.approx(float(pearson))
        and found["accuracy"] == (labels == predicted).double().mean()
    )
    assert summary(scores.take()) == {}, "counted anew"


@given(st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=3, max_size=3))
def test_matthews_of_three_classes(rows) -> None:
    counts = torch.tensor(rows)
    value = matthews(counts)
    assert -1 - 1e-12 <= value <= 1 + 1e-12
    assert matthews(counts[[2, 0, 1]][:, [2, 0, 1]]) == pytest.approx(value), "names of classes do not matter"
    only = torch.diag(counts.sum(1))
    if sum(bool(row) for row in only.sum(1)) > 1:
        assert matthews(only) == pytest.approx(1)
    assert matthews(torch.ones(3, 3)) == 0 and not math.isnan(value)


# --- a run


def settings(out: Path, data: str, tokenizer: str, **changed) -> TrainConfig:
    document = {
        "task": {"kind": "classify"},
        "model": {"type": "bert", "hidden": 32, "layers": 2, "heads": 4, "ffn": 64},
        "data": {
            "paths": [data], "columns": ["first", "second"], "label": "tone", "seq_len": 12, "held_out": 0.25,
            "tokenizer": tokenizer,
        },
        "mesh": {"pp": 2, "microbatches": 2},
        "optim": {"batch": 8, "steps": 60, "lr": 3e-3, "warmup": 2},
        "run": {"out": str(out), "eval_every": 0, "checkpoint_every": 45},
        "wire": {"preset": "max"},
    }  # fmt: skip
    return read_config({name: {**table, **changed.get(name, {})} for name, table in document.items()})


@pytest.mark.timeout(150)
@pytest.mark.lab
@on_a_network[1]
@pytest.mark.usefixtures("alone")
def test_runs_on_two_stages(tmp_path, tokenizer) -> None:
    """They learn through preset max, say so, go on with the same bits, and transformers loads what they saved. DeBERTa,
    whose relative positions both stages share, has the losses of one process, and equal copies."""
    data = write_tsv(tmp_path / "a.tsv", 64)
    whole, part = (settings(tmp_path / name, data, tokenizer) for name in ("whole", "part"))
    short = {"optim": {"steps": 4}, "wire": {"preset": "off"}}
    exact = settings(tmp_path / "exact", data, tokenizer, **short)
    deberta = {"model": {"type": "deberta-v2"}, **short}
    shared = settings(tmp_path / "shared", data, tokenizer, **deberta)
    one = gradients(settings(tmp_path / "alone", data, tokenizer, **deberta, mesh={"pp": 1}))
    preload = (
        "train_warm",
        "transformers.models.bert.modeling_bert",
        "transformers.models.deberta_v2.modeling_deberta_v2",
    )
    with Network(hosts=2, preload=preload) as net:
        found = launch(net, trained_and_gradients, [(whole, False), (exact, False)], shared, timeout=100)
        shutil.copytree(tmp_path / "whole/checkpoints/step-00000045", tmp_path / "part/checkpoints/step-00000045")
        again = launch(net, several, [(part, True)], timeout=60)
    assert [sums[0] for sums, _ in found] == [sums[0] for sums in again], "a resumed run has the same bits"
    events = read_events(tmp_path / "whole/metrics.jsonl")
    evals = [event for event in events if event["kind"] == "eval"]
    steps = [event for event in events if event["kind"] == "step"]
    assert evals[-1]["accuracy"] > 0.9 and evals[-1]["matthews"] > 0.8, evals
    assert all(0 <= step["accuracy"] <= 1 for step in steps) and steps[-1]["hit_rate"] == 1
    (about,) = (event for event in events if event["kind"] == "run")
    assert about["labels"] == ["bad", "good"]
    check_saved(tmp_path, exact, data, tokenizer)
    check_shared(tmp_path, [rank for _, rank in found], one)


def check_saved(tmp_path: Path, exact: TrainConfig, data: str, tokenizer: str) -> None:
    """The exact run's held-out loss and accuracy are those of the model that transformers loads."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exact/model").eval()
    AutoTokenizer.from_pretrained(tmp_path / "exact/model")
    samples = make_examples(exact.data, open_tokenizer(tokenizer, None, ends=False), None)
    inputs, labels = samples.rows(samples.held_out)
    segments = samples.segments(samples.held_out)
    kinds = (segments - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=inputs, attention_mask=(segments > 0).long(), token_type_ids=kinds).logits
    last = [event for event in read_events(tmp_path / "exact/metrics.jsonl") if event["kind"] == "eval"][-1]
    assert last["held_out"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), abs=1e-5)
    assert last["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert model.config.label2id == {"bad": 0, "good": 1}


def check_shared(tmp_path: Path, ranks: list[dict[str, list[float]]], one: dict[str, list[float]]) -> None:
    """Both stages have one gradient for what they share, and it is that of one process; so are the losses."""
    both = [name for name in ranks[0] if name in ranks[1]]
    names = ["rel_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias"]
    assert both == [f"deberta.encoder.{name}" for name in names]
    assert all(ranks[0][name] == ranks[1][name] for name in both), "to the bit"
    for rank in ranks:
        for name, values in rank.items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(one[name]), rtol=1e-4, atol=1e-7)
    found, expected = (
        [event for event in read_events(tmp_path / name / "metrics.jsonl") if event["kind"] == "step"]
        for name in ("shared", "alone")
    )
    for key in ("loss", "norm", "accuracy"):
        assert [e[key] for e in found] == pytest.approx([e[key] for e in expected], rel=1e-4), key


def test_one_rank_says_its_scores(tmp_path, tokenizer, capsys) -> None:
    write_tsv(tmp_path / "a.tsv", 40)
    (tmp_path / "run.toml").write_text(
        '[task]\nkind = "classify"\n[model]\ntype = "roberta"\nhidden = 16\nlayers = 1\nheads = 2\n'
        f'[data]\npaths = ["a.tsv"]\ncolumns = ["first"]\nlabel = "tone"\nseq_len = 8\nheld_out = 0.2\n'
        f'tokenizer = "{tokenizer}"\n[mesh]\nmicrobatches = 2\n[optim]\nbatch = 8\nsteps = 2\n'
        f'[run]\nout = "{tmp_path / "out"}"\nautocast = "bf16"\nrecompute = true\n'
    )
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert "accuracy" in capsys.readouterr().err
    last = read_events(tmp_path / "out/metrics.jsonl")[-2]
    assert last["kind"] == "eval" and {"accuracy", "matthews", "held_out"} <= last.keys()
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == 0
    assert "Matthews" in capsys.readouterr().out
    assert "Matthews" in (tmp_path / "page.html").read_text()
