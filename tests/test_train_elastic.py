"""`thinwire train --elastic`, `thinwire lab run --events`: members that come and go, as a user meets them."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lab_support import require_network
from safetensors.torch import load_file

from thinwire import cli
from thinwire.elastic import quorum as quorum_module
from thinwire.elastic import streams
from thinwire.elastic.healing import Healing
from thinwire.elastic.quorum import Quorum
from thinwire.errors import RunFailed
from thinwire.lab.events import Event, load_events
from thinwire.train.checkpoint import Checkpoints
from thinwire.train.command import _ended
from thinwire.train.config.sections import DataConfig
from thinwire.train.data.batches import Batches
from thinwire.train.data.samples import make_samples
from thinwire.train.data.tokenizer import open_tokenizer
from thinwire.train.members.late import Late
from thinwire.train.members.launch import _watch
from thinwire.train.members.roll import RECENT, Roll
from thinwire.train.members.state import Shared
from thinwire.train.metrics import read_events

HOSTS = ["host0", "host1", "host2"]
RUN = """
[model]
layers = 1
hidden = 16
heads = 2
[data]
seq_len = 16
samples = 100
[mesh]
dp = 3
microbatches = 1
[optim]
batch = 12
steps = {steps}
warmup = 0
[run]
out = "{out}"
eval_every = 4
elastic = true
min_replicas = 3
loggers = []
[wire]
preset = "max"
"""
KILL = """
[[events]]
step = 2
do = "kill"
host = "host2"
for = "0.2s"
"""


def write(tmp_path: Path, steps: int) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(steps=steps, out=tmp_path / "out"))
    return str(path)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")
def test_a_member_is_killed_and_comes_again_and_the_run_is_resumed(tmp_path, capsys):
    """Three members, all of which are needed: the two that are left wait until the third has taken their state."""
    require_network()
    events = tmp_path / "events.toml"
    events.write_text(KILL)
    out = tmp_path / "out"
    words = ["train", write(tmp_path, 12), "--elastic", "--local", "3", "--rate", "200kbit", "--timeout", "250"]
    assert cli.main([*words, "--events", str(events)]) == 0
    found = read_events(out / "metrics.jsonl")
    assert [event["step"] for event in found if event["kind"] == "step"] == list(range(1, 13)), "every step counts once"
    texts = [event["text"] for event in found if event["kind"] == "member"]
    assert any(text.startswith("host2 died and came again; 3 members") for text in texts), texts
    assert any(text.startswith("host2 took the others' state") for text in texts), texts
    rolls = [event["step"] for event in found if "members:" in event.get("text", "")]
    assert len(rolls) == len(set(rolls)), "who has joined does not know who was there before, and is not asked"
    seconds = [event["seconds"] for event in found if event["kind"] == "step"]
    assert seconds == sorted(set(seconds)), "time goes on, whoever is the first to note a step"
    for number in (1, 2, 3):
        own = {e["step"]: e["seconds"] for e in read_events(out / f"host{number}" / "metrics.jsonl") if "loss" in e}
        assert all(seconds[step - 1] == time for step, time in own.items()), "and is the same on all members"
    assert not (out / "members-ended").exists()
    assert cli.main(["report", str(out), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Members</h2>" in page and "host2 died and came again" in page and "took part in steps" in page
    models = [load_file(out / f"host{number}" / "model" / "model-00001-of-00001.safetensors") for number in (1, 2, 3)]
    assert all(torch.equal(models[0][name], other[name]) for other in models[1:] for name in models[0])
    words[1] = write(tmp_path, 15)
    assert cli.main([*words, "--resume"]) == 0
    steps = [event for event in read_events(out / "metrics.jsonl") if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 16))
    assert steps[-1]["gradient_bytes"] > steps[11]["gradient_bytes"] > 0, "counts go on where they were"
    assert cli.main(words) == 2 and "holds a run already" in capsys.readouterr().err


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")
def test_members_that_are_pipelines(tmp_path, capsys):
    """Two members of two stages each, with a tied embedding; one is killed, and takes the other's state stage by stage
    while it takes part without samples. Both are needed, so that they end together."""
    require_network()
    events, out = tmp_path / "events.toml", tmp_path / "out"
    events.write_text(KILL)
    text = (
        RUN.format(steps=8, out=out).replace("layers = 1", "layers = 2").replace("min_replicas = 3", "min_replicas = 2")
    )
    path = tmp_path / "run.toml"
    text = text.replace("dp = 3\nmicrobatches = 1", "dp = 2\npp = 2\nmicrobatches = 2")
    path.write_text(text.replace("elastic = true", 'elastic = true\nheal = "later"'))
    words = ["train", str(path), "--elastic", "--local", "2", "--rate", "1mbit", "--timeout", "250"]
    assert cli.main([*words, "--events", str(events)]) == 0
    found = read_events(out / "metrics.jsonl")
    assert [event["step"] for event in found if event["kind"] == "step"] == list(range(1, 9))
    texts = [event["text"] for event in found if event["kind"] == "member"]
    assert any(text.startswith("host2 died and came again; 2 members") for text in texts), texts
    assert any(text.startswith("host2 is there, without samples until the others' state is here") for text in texts)
    assert any(text.startswith("host2 took the others' state after step") for text in texts), texts
    last = [event for event in found if event["kind"] == "step"][-1]
    assert last["forward_bytes"] > 0 and last["backward_bytes"] > 0 and last["gradient_bytes"] > 0
    states = [read_checkpoint(out / f"host{number}" / "checkpoints" / "step-00000008") for number in (1, 2)]
    shared = {name for name in states[0] if name.startswith(("model/", "optim/"))}
    assert all(torch.equal(states[0][name], states[1][name]) for name in shared), "weights and moments of both stages"
    assert torch.equal(*(states[0][f"model/{name}"] for name in ("model.embed_tokens.weight", "lm_head.weight")))
    assert {name.partition("/")[0] for name in states[0]} >= {"exchange", "exchange-1", "tied", "tied-1"}
    path.write_text(path.read_text().replace("pp = 2", "pp = 1"))
    assert cli.main([*words, "--resume"]) == 1
    assert "is of members with [mesh] pp = 2, not 1" in capsys.readouterr().err


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    return Checkpoints(path.parent).read(path, lambda name: True)


class Torn(Quorum):
    """A member of two ranks, one of which has not got the state that the other has. came: the state comes now."""

    def __init__(self, came: bool) -> None:
        self.came, self.fell, self.manager, self.undecided, self.torn, self.staged = came, 0, self, 4, False, []
        self.inside = "two ranks"

    steps = property(lambda self: 7)

    def fall_behind(self) -> None:
        self.fell += 1

    def start_quorum(self) -> None:
        if self.came:
            self._load({"committed": 5})

    def errored(self) -> None: ...


def test_ranks_of_a_member_with_different_states_take_another_members(monkeypatch):
    monkeypatch.setattr(quorum_module, "world", lambda group: (2, 0))
    monkeypatch.setattr(quorum_module, "gather_json", lambda mine, group: [mine, [3, False]])
    one = Torn(came=True)
    one.begin()
    assert one.fell == 1 and not one.torn
    with pytest.raises(RunFailed, match="states of different steps, and no other member has a newer one"):
        Torn(came=False).begin()
    monkeypatch.setattr(quorum_module, "gather_json", lambda mine, group: [mine, mine])
    one = Torn(came=False)
    one.begin()
    assert one.fell == 0, "equal states are kept"


def test_why_a_member_takes_no_part_is_one_line(monkeypatch, caplog):
    """torchft's text of an error has its traceback in it."""
    manager_module = pytest.importorskip("torchft.manager")
    one = Torn(came=True)
    try:
        raise TimeoutError("no answer within 5 s")
    except TimeoutError as error:
        found = manager_module.ExceptionWithTraceback(error)
    assert "Traceback" in str(found)
    monkeypatch.setattr(quorum_module, "world", lambda group: (1, 0))
    monkeypatch.setattr(Torn, "errored", lambda self: found)
    one.connections = SimpleNamespace(shutdown=lambda: None)
    one.begin()
    assert caplog.messages == ["thinwire: this member takes no part in a step: no answer within 5 s"]


class Rank:
    """What a rank of a member trains, without a run: its gradients follow from the step's number."""

    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Linear(40, 30)
        self.adam = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.healing = Healing("127.0.0.1", 5.0, lambda: 1 << 20)
        shared = Shared(dict(self.model.named_parameters()), self.adam, {}, True, lambda whole: None)
        self.late = Late(shared, self.healing, folder, self.optimise)

    def optimise(self, rate: float, norm: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = rate / norm
        self.adam.step()

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        if self.late.is_whole:
            self.optimise(0.1, 1.0 + number)
        else:
            self.late.keep(number, 0.1, 1.0 + number)

    def bits(self) -> list[torch.Tensor]:
        return list(self.late.shared.tensors().values())


def test_a_state_that_comes_late_and_the_steps_since_then_give_the_same_bits(tmp_path):
    member, newcomer = Rank(tmp_path / "a"), Rank(tmp_path / "b")
    for number in range(3):
        member.step(number)
    assert newcomer.late.shared.digest() != member.late.shared.digest()
    newcomer.late.begin()
    assert newcomer.late.shared.digest() == "", "who has no state must not be taken for one with the same"
    assert newcomer.late.meet([member.late.about(), newcomer.late.about()], 60.0) == ""
    assert newcomer.late.members == [True, False]
    assert newcomer.late.proceed(3) == ""
    fetching = newcomer.late.fetching
    for number in range(3, 6):
        while number == 4 and fetching.thread.is_alive() and not (member.healing.wanted or member.healing.stream):
            time.sleep(0.01)  # until it was asked for; where it was at once, it may be here
        member.late.offer(number)  # the copy is of the first step at whose beginning it was asked for
        for one in (member, newcomer):
            one.step(number)
    said = newcomer.late.wait_to_the_end(6, 60.0)
    assert re.fullmatch(r"took the others' state after step [34], \d+ bytes, and repeated [23] steps", said), said
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(newcomer.bits(), member.bits(), strict=True))
    assert newcomer.late.shared.digest() == member.late.shared.digest() and not (tmp_path / "b").exists()
    newcomer.late.begin()
    nobody = "nobody who is there has the others' state"
    assert newcomer.late.meet([newcomer.late.about()], 60.0) == nobody, "those who have it may come back"
    with pytest.raises(RunFailed, match="all members that had the state are gone"):
        newcomer.late.meet([newcomer.late.about()], 0.01)
    assert newcomer.late.meet([newcomer.late.about(), member.late.about()], 0.0) == ""
    assert newcomer.late.meet([newcomer.late.about()], 60.0) == nobody, "the time begins anew"


def test_where_a_member_does_not_answer_another_one_is_asked(tmp_path):
    """The first of the two that have the state is cut off, and is still a member as far as anybody knows."""
    member, newcomer = Rank(tmp_path / "a"), Rank(tmp_path / "b")
    about = json.dumps(json.loads(member.healing.metadata()) | {"port": 9})
    newcomer.healing.token = f"{0:032x}"
    newcomer.late.begin()
    newcomer.late.meet([(True, about), member.late.about(), newcomer.late.about()], 60.0)
    deadline = time.monotonic() + 60
    while not member.healing.wanted and time.monotonic() < deadline:
        newcomer.late.proceed(0)
        time.sleep(0.01)
    member.late.offer(0)
    assert newcomer.late.wait_to_the_end(0, 60.0).startswith("took the others' state after step 0")
    assert newcomer.late.shared.digest() == member.late.shared.digest()


def test_a_state_that_does_not_come_at_all_ends_its_member_with_the_reason(tmp_path, caplog, monkeypatch):
    member, newcomer = Rank(tmp_path / "a"), Rank(tmp_path / "b")
    monkeypatch.setattr(streams, "unpack", lambda *about: bytearray(1 << 60))
    newcomer.late.begin()
    newcomer.late.meet([member.late.about(), newcomer.late.about()], 60.0)
    deadline = time.monotonic() + 60
    with pytest.raises(RunFailed, match="the others' state did not come in 10 attempts: MemoryError"):
        while time.monotonic() < deadline:
            newcomer.late.proceed(0)
            time.sleep(0.01)
    assert "the others' state did not come, and is asked for again: MemoryError" in caplog.text


def test_a_full_disk_for_means_ends_its_member_with_a_line(tmp_path):
    newcomer = Rank(tmp_path / "b")
    newcomer.late.begin()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(RunFailed, match=r"b: the means of a step cannot be kept: .*File too large"):
            newcomer.step(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_step_is_dealt_out_in_whole_micro_batches():
    samples = make_samples(DataConfig(seq_len=8, samples=60), open_tokenizer("bytes", None))
    batches = Batches(samples, 12, 0)
    whole = batches.peek().tolist()
    for members in (1, 2, 3, 4):
        parts = []
        for place in range(members):
            batches.share(place, members, 4)
            parts.append(batches.peek().tolist())
        assert [one for part in parts for one in part] == whole
        assert all(len(part) % 4 == 0 for part in parts) and (members < 4 or [] in parts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[mesh]\ntp = 2", "[mesh] tp = 2: not with [run] elastic"),
        ('[mesh]\npp = 2\nsplit = "time"', "[mesh] split = 'time': not with [run] elastic"),
        ('[optim]\nname = "frozen_adam"', "[optim] name = 'frozen_adam': not with [run] elastic"),
        ("[wire]\nauto = true", "[wire] auto = true: not with [run] elastic"),
    ],
)
def test_what_members_cannot_be_combined_with(tmp_path, capsys, change, said):
    path = tmp_path / "run.toml"
    path.write_text(f"{change}\n")
    assert cli.main(["train", str(path), "--elastic"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("statuses", "failed"), [([None, 1, 0], ""), ([None, 1, -9], "host1.0: it is broken")])
def test_an_interrupted_run_has_not_failed_because_one_member_did(tmp_path, capsys, statuses, failed):
    """host1 ended with an error; host2 left with a checkpoint when Ctrl-C was pressed, or was killed."""
    looks = iter([False, True])
    job = SimpleNamespace(
        placements=[SimpleNamespace(rank=n, host_number=n, label=f"host{n}.0") for n in range(3)], statuses=statuses,
        watch=lambda seconds: next(looks), output=lambda rank: ["it is broken"], seconds=1.0, lose=None,
        ask_to_end=lambda rank: None,
    )  # fmt: skip
    merged = SimpleNamespace(follow=lambda say: None, ended=False)
    script = SimpleNamespace(events=[], tick=lambda *about: None)
    assert _watch(None, job, merged, script, SimpleNamespace(asked=True), tmp_path / "ended", None) == failed
    assert "host1.0: it is broken" in capsys.readouterr().err and (tmp_path / "ended").exists()
    steps = [{"kind": "step", "step": 7}]
    assert _ended(steps, "done") == 130 and "stopped at step 7, with a checkpoint" in capsys.readouterr().out
    assert _ended([*steps, {"kind": "end", "step": 8}], "done") == 0 and capsys.readouterr().out == "done\n"


def test_who_came_and_went_and_who_is_slow():
    roll = Roll(slow=2.0)
    assert roll.meet([("a", "1"), ("b", "1")]) == "2 members: a, b"
    assert roll.meet([("a", "1"), ("b", "1")]) is None
    assert roll.meet([("a", "1"), ("b", "2"), ("c", "1")]) == "c came; b died and came again; 3 members: a, b, c"
    said = [line for _ in range(2 * RECENT) for line in roll.time([1.0, 1.1, 2.5])]
    assert said == ["c is slow: 2.5 s per sequence, the others 1.05 s"]
    assert roll.meet([("a", "1"), ("b", "2")]) == "c left; 2 members: a, b"


@pytest.mark.lab
def test_hosts_are_killed_added_and_frozen_in_mid_run(tmp_path, capsys):
    """host1 is killed and comes again, host2 comes later, host0 is frozen and cut off for a while; all end well."""
    require_network()
    program, events, record = (tmp_path / name for name in ("wait.py", "events.toml", "record.json"))
    program.write_text("import time\nprint('alive')\nfor _ in range(60): time.sleep(0.05)\nprint('end')\n")
    what = [("kill", 1), ("freeze", 0), ("cut", 0)]
    text = "".join(f'[[events]]\nat = "0.5s"\ndo = "{do}"\nhost = "host{n}"\nfor = "0.5s"\n' for do, n in what)
    events.write_text(text + '[[events]]\nat = "1s"\ndo = "add"\nhost = "host2"\n')
    words = ["lab", "run", "--hosts", "3", "--events", str(events), "--json", str(record), "--", sys.executable]
    assert cli.main([*words, str(program)]) == 0
    said = capsys.readouterr().out
    assert [said.count(f"host{n} | alive") for n in range(3)] == [1, 2, 1]
    assert [said.count(f"host{n} | end") for n in range(3)] == [1, 1, 1]
    happened = [(event["do"], event["host"]) for event in json.loads(record.read_text())["events"]]
    assert sorted(happened) == sorted([
        ("kill", "host1"), ("add", "host1"), ("freeze", "host0"), ("thaw", "host0"), ("cut", "host0"),
        ("restore", "host0"), ("add", "host2"),
    ])  # fmt: skip


def test_events_are_read_and_mistakes_named(tmp_path, capsys):
    path = tmp_path / "events.toml"
    path.write_text('run = "out"\n[[events]]\nstep = 3\ndo = "cut"\nhost = "host1"\nfor = "2s"\n')
    script = load_events(path, HOSTS)
    assert script.events == [Event("cut", "host1", None, 3, 2.0)] and script.cuts and script.absent(HOSTS) == []
    for wrong, said in (
        ('do = "explode"\nhost = "host1"\nat = "1s"', "do = 'explode': allowed are kill, freeze, cut, add"),
        ('do = "kill"\nhost = "host9"\nat = "1s"', "host = 'host9': the hosts are host0, host1, host2"),
        ('do = "kill"\nhost = "host1"', 'needs at = "20s" or step = 40, and not both'),
        ('do = "kill"\nhost = "host1"\nstep = 4', "a step is given, but not the folder of the run"),
        ('do = "add"\nhost = "host1"\nat = "1s"\nfor = "1s"', "for: is for what can be undone"),
        ('when = "now"', "when: no such key"),
    ):
        path.write_text(f"[[events]]\n{wrong}\n")
        words = ["lab", "run", "--hosts", "3", "--events", str(path), "--", "true"]
        assert cli.main(words) == 2
        assert said in capsys.readouterr().err
    path.write_text("")
    assert cli.main(["lab", "run", "--events", str(path), "--", "true"]) == 2
    assert "tables [[events]], one at least" in capsys.readouterr().err
    assert cli.main(["train", str(Path(__file__).parent / "none.toml"), "--events", str(path)]) == 2
