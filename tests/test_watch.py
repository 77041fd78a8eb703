"""`thinwire watch`: who gets the page, what it says of runs in every state, and how a browser shows it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import browser, events, write

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.report.links import boundary_errors, link_rates
from thinwire.report.runs import make_run
from thinwire.report.summary import summarise
from thinwire.train.metrics import METRICS
from thinwire.watch import serve
from thinwire.watch.follow import MOST, Follower
from thinwire.watch.page import ABOVE, BELOW, FIGURES, LivePage
from thinwire.watch.pictures import Pictures
from thinwire.watch.server import CONNECTIONS, REQUEST, PageServer

HOSTILE = '"><script>alert(1)</script>\x00<img src=x onerror=alert(1)>&amp;$\\frac$'
RANKS = {"sent": [1, 2, 3, 4], "errors": {"forward": [0.1, None, 0.2, None], "backward": [None, 0.3, None, 0.3]}}


def with_ranks(lines: list[dict]) -> list[dict]:
    """Events of four ranks, of which rank r sends 100 (r + 1) kB per step, and the errors of their boundary."""
    sent = {e["step"]: [100_000 * e["step"] * (rank + 1) for rank in range(4)] for e in lines}
    return [e | {"ranks": RANKS | {"sent": sent[e["step"]]}} if e["kind"] == "step" else e for e in lines]


@contextmanager
def served(*folders: Path) -> Iterator[PageServer]:
    server = PageServer(LivePage(folders))
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def ask(server: PageServer, path: str, host: Sequence[str] | None = None, method: str = "GET") -> Any:
    """The response to a request for `path` as it stands; `host`: the Host headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    for name in [f"127.0.0.1:{server.server_port}"] if host is None else host:
        connection.putheader("Host", name)
    connection.endheaders()
    response = connection.getresponse()
    response.body = response.read()
    connection.close()
    return response


def draw_all(page: LivePage) -> None:
    """Ask for the parts until every figure is drawn."""
    while page.parts() and len(page.pictures.drawn) <= len(FIGURES):  # and the timelines
        pass


def undrawn(*folders: Path, monkeypatch: pytest.MonkeyPatch) -> LivePage:
    monkeypatch.setattr(Pictures, "update", lambda *of: None)
    return LivePage(folders)


def add(folder: Path, *lines: dict | str) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / METRICS).open("a") as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def text(part: str) -> str:
    """The words of a part, which must be well formed."""
    return "".join(ET.fromstring(f"<div>{part}</div>").itertext())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended."""
    return Path(write(tmp_path_factory.mktemp("watch") / "max", with_ranks(events("max", 0.3, 10_000))))


def test_without_the_token_there_is_nothing(run: Path) -> None:
    """Nor is there a file: whatever the path, it is only looked up in a table."""
    with served(run) as server:
        own = f"/{server.token}"
        found = ask(server, own + "/")
        assert found.status == 200 and b'<section id="now">' in found.body
        assert "default-src 'none'" in found.headers["Content-Security-Policy"]
        assert found.headers["Server"] == "thinwire"
        assert ask(server, own + "/watch.js?1").status == ask(server, own + "/page.css").status == 200
        assert ask(server, own + "/", method="HEAD").body == b""
        for path in ("/", "", "/parts", "//parts", own, own[:-1] + "/", own + "x/", "/%C3%A9/parts"):
            assert ask(server, path).status == 404, path
        for path in ("/server.py", "/../server.py", f"/{run}/metrics.jsonl", "/figure/", "/figure/../../metrics.jsonl"):
            assert ask(server, own + path).status == 404, path
        assert ask(server, own + "/", method="POST").status == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (["127.0.0.1:1"], 200), (["localhost"], 200), (["LocalHost:9"], 200), (["[::1]:9"], 200), (["10.0.0.1"], 200),
        (["evil.example"], 403), (["localhost.evil.example:80"], 403), (["127.0.0.1.evil.example"], 403),
        (["localhost", "evil.example"], 403), ([""], 403), ([], 403),
    ],
    ids=str,
)  # fmt: skip
def test_names_of_other_sites_are_refused(host: list[str], status: int, run: Path) -> None:
    """Also with the right token: another site can make its own name point here (DNS rebinding)."""
    with served(run) as server:
        assert ask(server, f"/{server.token}/", host).status == status


def test_requests_are_bounded(run: Path) -> None:
    with served(run) as server:
        place = ("127.0.0.1", server.server_port)
        with mock.patch.object(Thread, "start", side_effect=RuntimeError), socket.create_connection(place, 10) as line:
            assert line.recv(1) == b"" and server.free._value == CONNECTIONS  # no thread could be started
        for request in (b"GET / HTTP/1.0\r\n" + b"X: y\r\n" * REQUEST, b"GET /" + b"x" * 2 * REQUEST):
            with socket.create_connection(place, timeout=10) as line:
                line.sendall(request[: REQUEST + 1])
                assert line.recv(100).split()[1:2] in ([b"431"], [b"400"], [])
        with socket.create_connection(place, timeout=10) as line:
            line.sendall(b"GET /\xe9/parts HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert line.recv(100).split()[1] == b"404"
        idle = [socket.create_connection(place, timeout=10) for _ in range(CONNECTIONS)]
        while server.free._value:  # until all are taken
            pass
        with socket.create_connection(place, timeout=10) as line:
            assert line.recv(1) == b""
        for line in idle:
            line.close()


@pytest.mark.slow
def test_hostile_names_and_metrics_are_text(tmp_path: Path) -> None:
    """Whatever the folder, the run's name, its notes and its numbers are, no element comes from them."""
    first, *rest = with_ranks(events("max", 0.3, 10_000, steps=10))
    odd = {"kind": HOSTILE, "step": 3, HOSTILE: [HOSTILE]}
    lines = [first | {"name": HOSTILE}, {"kind": "note", "step": 1, "text": HOSTILE}, odd, *rest]
    lines.append({"kind": "member", "step": 4, "text": f"rank 3 left {HOSTILE}"})
    folder = Path(write(tmp_path / '"><b>', lines, config=CONFIG_OF_NOBODY))
    with served(folder) as server:
        draw_all(server.page)
        parts = json.loads(ask(server, f"/{server.token}/parts").body)
        frame = ask(server, f"/{server.token}/").body.decode()
        images = re.findall(r'src="(figure/[^"]+)"', "".join(parts.values()))
        pictures = [ask(server, f"/{server.token}/{image}").body.decode() for image in images]
    assert len(images) > 8
    for page in (*(f"<div>{part}</div>" for part in parts.values()), *pictures):
        for element in ET.fromstring(page).iter():
            assert element.tag.rpartition("}")[2] not in ("script", "b", "foreignObject")
            assert not any(name.startswith("on") for name in element.attrib), element.attrib
    assert "<b>" not in frame and "rank 3 left" in text(parts["members"]) and "alert(1)" in text(parts["told"])
    assert "rank 3: 10.7 Mbit/s, 53 % of the step" in text(parts["now"])  # 400 kB in 0.3 s, of 20 Mbit/s


CONFIG_OF_NOBODY = "[model]\nhidden = '</script>'\n"
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3)
)
KEYS = ("loss", "tokens", "step_seconds", "wait_seconds", "seconds", "forward_bytes", "raw_bytes", "errors", "ranks",
        "mesh", "rate", "steps", "name", "held_out", "text", "wire", "parameters", "skips", "hit_rate")  # fmt: skip
KINDS = ("run", "step", "eval", "end", "note", "decision", "member", "new")
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 10**30), st.dictionaries(st.sampled_from(KEYS), VALUES)),
    max_size=6,
)


@pytest.mark.slow
@given(events=EVENTS)
def test_any_metrics_give_a_page(events: list, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("any")
        page = undrawn(folder, monkeypatch=patch)
        add(folder, *({**values, "kind": kind, "step": step} for kind, step, values in events))
        for part in page.parts().values():
            text(part)


def test_what_is_added_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From before its beginning to its end, and when the same folder is used again."""
    folder = tmp_path / "run"
    page = undrawn(folder, monkeypatch=monkeypatch)
    first, *rest = events("safe", 1.0, 100, steps=12)
    folder.mkdir()
    (folder / "run.toml").write_text("[wire]\n")
    assert "not begun" in text(page.parts()["now"]) and page.parts().keys() == {*ABOVE, *FIGURES, *BELOW}
    add(folder, first | {"steps": 12})
    assert "○ starting0 of 12" in text(page.parts()["now"])
    add(folder, *rest[:5], '{"kind": "step", "st')
    assert "● running4 of 12" in text(page.parts()["now"]) and page.parts()["warnings"] == ""
    add(folder, 'ep"}\n', *rest[5:-1], {"kind": "decision", "step": 12, "seconds": 1.5, "wire": {"preset": "max"}})
    parts = page.parts()
    assert "● running12 of 12" in text(parts["now"]) and "1024" in text(parts["now"])
    assert "line 7 cannot be read as events" in text(parts["warnings"])
    assert "a step should take 1.5 s" in text(parts["told"]) and "preset: max" in text(parts["told"])
    add(folder, rest[-1])
    assert "■ ended12 of 12" in text(page.parts()["now"])
    (folder / METRICS).unlink()
    assert "not begun" in text(page.parts()["now"])
    (folder / METRICS).mkdir()
    assert "cannot be read" in text(page.parts()["now"]) and "directory" in text(page.parts()["warnings"])


def test_a_run_that_says_nothing_more_is_called_silent(tmp_path: Path) -> None:
    lines = events("safe", 20.0, 100, steps=3)[:-1]
    add(tmp_path, *lines, '{"kind": "st')
    written = (tmp_path / METRICS).stat().st_mtime
    words = {late: Follower(tmp_path, lambda late=late: written + late).look() for late in (40, 190, 210)}
    assert [words[late].word[2:8] for late in words] == ["runnin", "runnin", "silent"]
    said = " ".join(words[210].warnings)
    assert "no new line in metrics.jsonl for 210 s" in said and "the last line is cut off" in said


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    add(tmp_path, *({"kind": "step", "step": step, "loss": 1.0} for step in range(2 * MOST + 5)))
    steps = [event["step"] for event in Follower(tmp_path).look().run.steps]
    assert MOST / 2 < len(steps) <= MOST + 1 and steps[-1] == 2 * MOST + 4 and len({*steps}) == len(steps)


def test_each_links_rate_and_each_boundarys_error(run: Path) -> None:
    """Ranks of a tensor-parallel group share a link; where every rank sends both ways, it is named by its stage."""
    lines = with_ranks(events("max", 0.3, 10, steps=3))
    plain = make_run(run, lines)
    assert [(line.name, round(line.points[-1][1])) for line in link_rates(plain)] == [
        (f"rank {rank}", round((rank + 1) * 8e5 / 0.3)) for rank in range(4)
    ]
    found = {kind: boundary_errors(plain, kind) for kind in ("forward", "backward", "gradient")}
    assert [(line.name, line.points[0]) for line in found["forward"]] == [("0→1", (1.0, pytest.approx(0.15)))]
    assert [line.name for line in found["backward"]] == ["1→0"] and found["gradient"] == []
    lines[0]["mesh"] = {"dp": 1, "pp": 2, "tp": 2}
    assert [line.name for line in link_rates(make_run(run, lines))] == ["ranks 0–1", "ranks 2–3"]
    for event in lines:
        event.get("ranks", {}).get("errors", {})["forward"] = [0.1, 0.1, 0.2, 0.2]
    assert [line.name for line in boundary_errors(make_run(run, lines), "forward")] == ["stage 0", "stage 1"]


def test_several_runs_stand_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("a", 2.0), ("b", 1.0)):
        add(tmp_path / name, *events("max", seconds, 100))
    page = undrawn(tmp_path / "a", tmp_path / "b", tmp_path / "later", monkeypatch=monkeypatch)
    table = ET.fromstring(f"<div>{page.parts()['now']}</div>").find(".//tbody")
    assert table is not None and [row[0].text for row in table] == ["max (a)", "max (b)", "later"]
    add(tmp_path / "later", *events("max", 4.0, 100))
    assert "2× faster" in text(page.parts()["now"]) and "0.5×" not in text(page.parts()["now"])


def test_drawing_takes_a_small_share_of_the_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a figure takes a second: two per request at first, and then one in ten seconds, the oldest first."""
    now = 0.0

    def draw(*of: object) -> tuple[None, str, str]:
        nonlocal now
        now += 1.0
        return None, "", ""

    monkeypatch.setattr("thinwire.watch.pictures._jobs", lambda *of: dict.fromkeys("abc", draw))
    pictures = Pictures(lambda: now, lambda: now)
    numbers = []
    for version, wait in ((1, 0.0), (1, 0.0), (1, 99.0), (2, 0.0), (3, 8.0), (3, 2.0), (3, 10.0), (3, 10.0), (3, 99.0)):
        now += wait
        pictures.update((), summarise([make_run(run, ())]), version)
        numbers.append([picture.number for picture in pictures.drawn.values()])
    assert numbers == [[1, 2], [1, 2, 3], [1, 2, 3], *[[4, 2, 3]] * 2, [4, 5, 3], [4, 5, 6], *[[7, 5, 6]] * 2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no run given"),
        (["a", "./a"], "given twice"),
        (["a", "--port", "99999"], "--port 99999: allowed are 1 to 65535"),
        (["a", "--bind", "example.org"], "--bind example.org: must be an address of this machine"),
        (["a", "--bind", "192.0.2.1"], "cannot serve at 192.0.2.1, port 0"),
        ([__file__], "is no folder"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *words]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and told in said[0]


def test_a_port_in_use_is_told(run: Path) -> None:
    with served(run) as server, pytest.raises(UsageError, match="in use; give another --port"):
        PageServer(LivePage([run]), port=server.server_port)


@pytest.mark.timeout(60)
def test_ctrl_c_ends_it_with_one_line(run: Path) -> None:
    command = [sys.executable, "-m", "thinwire", "watch", str(run)]

    def heed_ctrl_c() -> None:  # where tests run in the background of a shell it is ignored, and children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as process:
        assert process.stderr is not None
        address, forward, _ = [process.stderr.readline() for _ in range(3)]
        url = address.removeprefix("watch: ").strip()
        port = url.split(":")[2].split("/")[0]
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in forward
        assert urllib.request.urlopen(url, timeout=10).status == 200
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=10)
    assert process.returncode == 0 and rest.strip() == "watch ended"


def test_beside_a_training_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--watch` serves the run's folder while it goes on; on another rank than the first there is no page."""
    seen: list[str] = []

    def train(args: Any) -> int:
        said = capsys.readouterr().err
        seen.append(said)
        if said:
            url = re.findall("http://[^ \n]+", said)[0]
            add(tmp_path / "out", *events("max", 1.0, 10, steps=5))
            seen.append(text(json.load(urllib.request.urlopen(url + "parts", timeout=30))["now"]))
            seen.append(url)
        return 0

    monkeypatch.setattr("thinwire.train.command.run", train)
    monkeypatch.setattr(serve, "LAST_LOOK", 0.1)
    monkeypatch.setattr(Pictures, "update", lambda *of: None)
    (tmp_path / "run.toml").write_text("[data]\nseq_len = 64\n")
    words = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--watch"]
    assert main(words) == 0 and "■ ended" in seen[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(seen[2], timeout=5)
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert main(words) == 0 and seen[3:] == [""]


def show(url: str, folder: Path, *options: str) -> str:
    """What a browser prints about the page, after some seconds of its clock."""
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *quiet]
    done = subprocess.run(
        [*command, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=9000", *options, url],
        check=True, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_browser_follows_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs under the page's own policy: steps that are added while it looks appear, figures too. In a small
    window nothing sticks out, and a dark one has no white sheets."""
    import numpy as np
    from PIL import Image

    first, *rest = with_ranks(events("safe", 1.0, 100))
    add(tmp_path / "grows", first)
    asked = LivePage.parts

    def grow(page: LivePage) -> dict[str, str]:
        add(tmp_path / "grows", *(rest.pop(0) for _ in range(min(2, len(rest) - 4))))
        return asked(page)

    with served(run, tmp_path / "grows") as server:
        draw_all(server.page)
        monkeypatch.setattr(LivePage, "parts", grow)
        page = show(server.url, tmp_path, "--dump-dom", "--window-size=1280,2000")
        steps = re.search(r"● running</td><td>(\d+)</td>", page)
        assert steps is not None and int(steps[1]) >= 3
        assert "Following; read at" in page and "No connection" not in page and page.count("<img") > 8
        looks = {}
        for name, options in {"dark": ["--blink-settings=preferredColorScheme=0"], "phone": []}.items():
            size = "--window-size=400,2500" if name == "phone" else "--window-size=1280,2000"
            show(server.url, tmp_path, f"--screenshot={tmp_path / name}.png", size, *options)
            looks[name] = np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")).astype(int)
    assert (looks["dark"] > 200).all(axis=2).mean() < 0.1
    assert (looks["phone"][:, -3:] > 250).all() and (looks["phone"].min(axis=2) < 200).any(axis=1).mean() > 0.3
