"""run.toml of the trainer: what --init writes is the default, and every mistake is one line that names it."""

import dataclasses
import re
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.train.config import sections as config
from thinwire.train.config.sections import SECTIONS, LoraConfig, TrainConfig, init_text, load, read_config


def test_init_text_parses_to_the_defaults_but_for_a_start() -> None:
    read, plain = read_config(tomllib.loads(init_text())), TrainConfig()
    assert read.mesh.ranks == 4 and read.data.samples == 800 and read.wire == {"preset": "max"}
    mesh, data = dataclasses.replace(read.mesh, dp=1, pp=1), dataclasses.replace(read.data, samples=0)
    assert dataclasses.replace(read, mesh=mesh, data=data, wire={}) == plain


def test_init_text_names_every_key() -> None:
    text = init_text()
    for cls in (*SECTIONS.values(), LoraConfig):
        for field in dataclasses.fields(cls):
            assert re.search(rf"^(# )*(\[model\.)?{field.name}( =|\])", text, re.M), field.name


def test_commented_examples_are_allowed_values() -> None:
    """Each commented-out key, uncommented alone, is read; so the examples cannot rot."""
    shown = re.findall(r"^\[(\w+)\]|^# (\w+ = .*?) +# ", init_text(), re.M)
    section, tried = "", 0
    for header, line in shown:
        section = header or section
        if not line or section == "wire" or line.startswith(("r =", "alpha", "dropout", "from_layer")):
            continue
        lora = "[model.lora]\n" if line.startswith("base_bits") else ""
        schedule = 'schedule = "Interleaved1F1B"\n' if line.startswith("virtual") else ""
        document = tomllib.loads(f"[{section}]\n{schedule}{line}\n{lora}")
        if line.startswith(("labels", "columns")):
            document.setdefault("task", {})["kind"] = "classify"
            document.setdefault("data", {})["paths"] = ["a.tsv"]
            document["model"] = {"type": "bert"}
        read_config(document)
        tried += 1
    assert tried == 10


def test_the_lora_table_uncommented() -> None:
    block = init_text().split("# [model.lora]")[1].split("\n\n")[0]
    lines = "[model.lora]" + re.sub(r"^# (?=r |alpha|dropout|from_layer)", "", block, flags=re.M)
    assert read_config(tomllib.loads(lines)).model.lora == LoraConfig()


SITES = '[local]\npreset = "local-max"\n[mesh]\nsites = 2\n'


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[modle]", "[modle]: no such section; allowed are task, model, data, mesh, optim, run, boundary, wire"),
        ("mesh = 3", "mesh = 3: must be a table, [mesh]"),
        ("wire = 3", "wire = 3: must be a table, [wire]"),
        ("[mesh]\ndpp = 2", "[mesh] dpp: no such key; allowed are sites, dp, pp, tp"),
        ("[mesh]\ndp = 0", "[mesh] dp = 0: allowed is a whole number, 1 or more"),
        ("[mesh]\ndp = true", "[mesh] dp = True: allowed is a whole number"),
        ("[mesh]\ndp = 2.0", "[mesh] dp = 2.0: allowed is a whole number"),
        ("[mesh]\ntp = true", "[mesh] tp = True: allowed is a whole number, 1 or more"),
        ('[mesh]\nschedule = "1f2b"', "[mesh] schedule = '1f2b': allowed is one of GPipe, 1F1B"),
        ('[mesh]\nschedule = "1F1B-doubled"', "[mesh] schedule = '1F1B-doubled': allowed is one of"),
        ('[mesh]\nschedule = "gpipe"\nahead = 2', "[mesh] ahead = 2: is for 1F1B; GPipe takes 1"),
        ("[mesh]\nvirtual = 3", "[mesh] virtual = 3: 1F1B has 1 stage"),
        ('[mesh]\npp = 4\nschedule = "dualpipev"', "[mesh] microbatches = 4: DualPipeV needs at least"),
        ("[optim]\nbatch = 6", "[optim] batch = 6: must be a multiple of dp × microbatches × accumulate = 4"),
        ("[optim]\nlr = 0", "[optim] lr = 0: allowed is a number above 0"),
        ("[optim]\nlr = inf", "[optim] lr = inf: allowed is a number above 0"),
        ("[optim]\nlr = nan", "[optim] lr = nan: allowed is a number above 0"),
        ("[optim]\nbetas = [0.9]", "[optim] betas = [0.9]: allowed is a list of 2 values"),
        ("[optim]\nbetas = [0.9, 1.0]", "at most 0.999999"),
        ('[optim]\nname = "sgd"', "[optim] name = 'sgd': allowed is adamw, frozen_adam"),
        ('[model]\ntype = "t5"', "[model] type = 't5': allowed is llama, qwen2, qwen3, gpt2, bert, roberta"),
        ("[model]\nheads = 7", "[model] heads = 7: must divide 256"),
        ("[model]\nkv_heads = 3", "[model] kv_heads = 3: must divide 8"),
        ("[model]\nbase_bits = 8", "[model] base_bits = 8: needs [model.lora]"),
        ("[model]\nlora = 8", "model.lora = 8: must be a table, [model.lora]"),
        ("[model.lora]\nrank = 8", "[model.lora] rank: no such key; allowed are r, alpha"),
        ('[model]\npath = "a"\nconfig = "b"', "give path or config, not both"),
        ("[model]\npositions = 8", "[model] positions = 8: must be at least [data] seq_len = 256"),
        ('[data]\npaths = "a.txt"', "[data] paths = 'a.txt': allowed is a list of values"),
        ("[data]\nheld_out = 1.0", "[data] held_out = 1.0: allowed is a number of at least 0 and at most 0.9"),
        ("[mesh]\nsites = 2", "[mesh] sites = 2: needs [local]"),
        ("[local]\nevery = 3", "[local]: is for several sites"),
        (SITES + "tp = 2", "[mesh] tp = 2: tensor parallelism cannot be combined with sites = 2"),
        (SITES + '[optim]\nname = "frozen_adam"', "is for one site; with [mesh] sites = 2 take adamw"),
        (SITES + "[boundary]\nrank = 8", "[boundary] rank = 8: boundaries learn in one site"),
        (SITES + "[optim]\nbatch = 4", "must be a multiple of sites × dp × microbatches × accumulate = 8"),
        ('[run]\nrecompute = "yes"', "[run] recompute = 'yes': allowed is true or false"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(toml: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        read_config(tomllib.loads(toml))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@given(
    section=st.sampled_from([*SECTIONS, "wire", "other"]),
    key=st.text(max_size=8) | st.sampled_from(["dp", "lr", "path", "lora", "betas", "schedule", "paths", "base_bits"]),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers()),
)
def test_any_value_is_read_or_refused_by_name(section: str, key: str, value: object) -> None:
    if section == "wire":
        assert read_config({section: {key: value}}).wire == {key: value}
        return
    try:
        read_config({section: {key: value}})
    except UsageError as error:
        assert f"[{section}]" in str(error) or section in str(error)


def test_schedule_is_spelt_torchs_way_and_placed() -> None:
    mesh = read_config(tomllib.loads('[mesh]\npp = 2\nschedule = "zbv"')).mesh
    assert mesh.schedule == "ZBVZeroBubble"
    assert mesh.plan().rank_of == (0, 1, 1, 0)


def test_wire_is_passed_through() -> None:
    assert read_config(tomllib.loads("[wire.forward]\nbits = 4")).wire == {"forward": {"bits": 4}}


def test_files_are_looked_for_beside_run_toml(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "run.toml").write_text('[data]\npaths = ["text.txt"]\n')
    assert load(tmp_path / "run.toml").data.paths == (str(tmp_path / "text.txt"),)
    for section, key, value in (("data", "paths", ["no"]), ("model", "path", "no"), ("data", "tokenizer", "no")):
        (tmp_path / "run.toml").write_text(f"[{section}]\n{key} = {value!r}\n")
        with pytest.raises(UsageError, match=rf"\[{section}\] {key} = 'no': no such file or folder"):
            load(tmp_path / "run.toml")


def test_a_file_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model")
    with pytest.raises(UsageError, match="is not TOML"):
        load(tmp_path / "bad.toml")


def test_microbatch_size() -> None:
    toml = "[mesh]\ndp = 2\nmicrobatches = 2\n[optim]\nbatch = 24\naccumulate = 3"
    assert read_config(tomllib.loads(toml)).microbatch == 2


def test_reading_a_configuration_needs_no_torch() -> None:
    code = f"import sys, {config.__name__}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
