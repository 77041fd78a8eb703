"""Nothing that a stranger wrote is run: no pickles between ranks, no code in checkpoints, models and data."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import UsageError
from thinwire.parallel import read_state
from thinwire.pipeline.handshake import StageInfo, _read_infos
from thinwire.pipeline.shapes import _spec
from thinwire.train.config.families import FAMILIES
from thinwire.train.config.sections import DataConfig
from thinwire.train.data.documents import read_documents
from thinwire.train.data.tokenizer import CheckpointTokenizer
from thinwire.train.model.families import read_supported
from thinwire.train.model.weights import Checkpoint

ROOT = Path(__file__).parent.parent

# --- between ranks

INFO = {
    "stages": 2, "config": {"seed": "0"}, "inputs": ["(2, 8) torch.float32"], "outputs": None, "dropout": [],
    "first_tag": 7, "run": "0123abcd",
}  # fmt: skip


def test_a_stage_is_described_in_json() -> None:
    found = _read_infos([[1, INFO]], 0)
    assert found == {1: StageInfo(2, {"seed": "0"}, ("(2, 8) torch.float32",), None, [], 7, "0123abcd")}


@pytest.mark.parametrize(
    "said",
    [
        None, 7, "text", [[1]], [["one", INFO]], [[1, None]], [[1, []]], [[1, INFO | {"more": 1}]],
        [[1, {name: value for name, value in INFO.items() if name != "run"}]],
        *([[1, INFO | change]] for change in (
            {"run": "../../etc"}, {"run": 7}, {"stages": "2"}, {"stages": True}, {"stages": -1}, {"config": []},
            {"config": {"seed": 0}}, {"inputs": 3}, {"outputs": [3]}, {"dropout": None}, {"first_tag": 2**40},
        )),
    ],
    ids=lambda said: f"{said!r:.60}",
)  # fmt: skip
def test_a_stage_described_in_another_way_is_one_line(said: Any) -> None:
    with pytest.raises(UsageError, match="rank 3 of the pipeline describes its stages in another way") as caught:
        _read_infos(said, 3)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(("shape", "kind"), [([2, -1], "float32"), ([2], "load"), (["2"], "float32"), ([2], "none")])
def test_shapes_of_another_rank_are_checked(shape: list[int], kind: str) -> None:
    with pytest.raises(RuntimeError, match="another rank announces a tensor"):
        _spec(shape, kind)


class Hostile:
    """Pickled, it is a call."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.ran),)


def test_state_in_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(UsageError, match="may run code, and is not read"):
        read_state(tmp_path, "wire")
    assert not (tmp_path / "ran").exists()


# --- in our own source

MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
BUILTINS = {"eval", "exec"}
FUNCTIONS = {"os.system", "os.popen", "tempfile.mktemp", "yaml.load", "yaml.unsafe_load"}
OBJECTS = {  # torch's collectives that send pickles
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
SWITCHES = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "weights_only": True}  # name → allowed
ALLOWED = {
    ("thinwire/lab/job.py", "pickle"): "answers of ranks that this process has forked on this machine",
    ("thinwire/lab/program.py", "pickle"): "a function and its arguments, for ranks that this process has forked",
    ("thinwire/lab/program.py", "exec"): "the user's own script, as Python's command runs it",
    ("thinwire/lab/program.py", "multiprocessing"): "how a script's main module is named in a rank",
    ("thinwire/lab/client.py", "multiprocessing"): "a pipe to the supervisor, which this process has started",
    ("thinwire/lab/supervisor.py", "multiprocessing"): "the other end of that pipe",
    ("thinwire/theory/experiments.py", "multiprocessing"): "a pool of this process's own children",
    ("thinwire/bench/scratch/command.py", "multiprocessing"): "the same",
    ("thinwire/bench/scratch/lengths.py", "multiprocessing"): "the same",
    ("thinwire/distributed/checkpoint_files.py", "pickle"): "an unpickler that knows a checkpoint's metadata only",
}


def dotted(node: ast.expr) -> str:
    """a.b.c of a name or an attribute; "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def in_call(call: ast.Call) -> set[str]:
    """What is forbidden in a call: its name, or an argument of it."""
    name, given = dotted(call.func), {word.arg: word.value for word in call.keywords}
    found = {name} & (BUILTINS | FUNCTIONS)
    if name == "torch.load" and "weights_only" not in given:
        found.add("torch.load")
    for word, allowed in SWITCHES.items():
        value = given.get(word)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is allowed):
            found.add(f"{word} other than {allowed}")
    return found


def forbidden(source: str) -> set[str]:
    """What a file must not use, as far as its text tells."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            found |= ({str(node.module).partition(".")[0]} & MODULES) | (names & OBJECTS)
            found |= {f"{node.module}.{name}" for name in names} & (FUNCTIONS | {"torch.load"})
        elif isinstance(node, ast.Call):
            found |= in_call(node)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & OBJECTS
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"), ("import multiprocessing.connection", "multiprocessing"),
        ("from pickle import loads", "pickle"), ("eval('1')", "eval"),
        ("torch.load(f)", "torch.load"), ("torch.load(f, weights_only=False)", "weights_only other than True"),
        ("from torch import load", "torch.load"), ("run(x, shell=True)", "shell other than False"),
        ("from os import system", "os.system"), ("tempfile.mktemp()", "tempfile.mktemp"), ("yaml.load(f)", "yaml.load"),
        ("dist.all_gather_object(a, b)", "all_gather_object"),
        ("from torch.distributed import gather_object", "gather_object"),
        ("A.from_pretrained(p, trust_remote_code=allow)", "trust_remote_code other than False"),
    ],
)  # fmt: skip
def test_each_kind_is_found(source: str, found: str) -> None:
    assert forbidden(source) == {found}


def test_our_own_source_runs_nothing_that_it_reads() -> None:
    harmless = "torch.load(f, weights_only=True)\nmodel.eval()\nA.from_pretrained(p, trust_remote_code=False)"
    assert forbidden(harmless) == set()
    files = [path for folder in ("thinwire", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {(str(path.relative_to(ROOT)), what) for path in files for what in forbidden(path.read_text())}
    assert found == set(ALLOWED)


# --- models, tokenizers and data

PROGRAM = "import os\nos.mkdir({ran!r})\n"
AUTO_MAP = {
    "AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel",
    "AutoTokenizer": [None, "custom.CustomTokenizer"],
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with a model type of its own, whose code makes the folder `ran`."""
    (tmp_path / "custom.py").write_text(PROGRAM.format(ran=str(tmp_path / "ran")))
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "custom", "auto_map": AUTO_MAP}))
    return tmp_path


def check_refused(call: Callable[[], object], words: str, folder: Path) -> None:
    """`call` raises one line with these words, and ran nothing."""
    with pytest.raises(UsageError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value) and not (folder / "ran").exists()


@pytest.mark.parametrize("model_type", ["custom", "llama"])
def test_a_model_with_code_of_its_own_is_refused(hostile: Path, model_type: str) -> None:
    (hostile / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": AUTO_MAP}))
    for source in (hostile, hostile / "config.json"):
        check_refused(partial(read_supported, str(source)), r"config.json: needs Python code .* not run", hostile)


@pytest.mark.parametrize("with_config", [True, False])
def test_a_tokenizer_with_code_of_its_own_is_refused(hostile: Path, with_config: bool) -> None:
    if not with_config:
        (hostile / "config.json").unlink()
    check_refused(lambda: CheckpointTokenizer(hostile), r"config.json: needs Python code", hostile)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_weights_in_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    check_refused(lambda: Checkpoint(tmp_path, FAMILIES["llama"]), f"{name} is a pickle, .* convert", tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_an_index_names_safetensors_of_its_own_folder_only(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    check_refused(lambda: Checkpoint(tmp_path, FAMILIES["llama"]), "is no safetensors file of this folder", tmp_path)


def test_scripts_of_data_sets_are_not_run(tmp_path: Path) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text(PROGRAM.format(ran=str(tmp_path / "ran")))
    config = DataConfig(paths=(str(tmp_path),), format="datasets")
    check_refused(lambda: list(read_documents(config)), "scripts of data sets are not run", tmp_path)
