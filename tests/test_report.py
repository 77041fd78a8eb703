"""`thinwire report`: the page's numbers, its form, what it says of runs that are damaged or do not compare."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.config.presets import PRESETS
from thinwire.report.figures import errors, smooth, training
from thinwire.report.runs import METRICS, reached, read_runs
from thinwire.report.summary import summarise
from thinwire.terminal import table
from thinwire.train.config.sections import RunConfig, load
from thinwire.train.rank import record

ROOT = Path(__file__).parent.parent
RAW = 1_000_000  # bytes a step that fp32 would send
CONFIG = """[model]
hidden = 64
layers = 4
heads = 4
[data]
seq_len = 64
[mesh]
dp = 2
pp = 2
[optim]
batch = 16
[wire]
preset = "{name}"
"""


def events(name: str, seconds: float, sent: int, steps: int = 40, final: float = 3.0, **about: Any) -> list[dict]:
    """A run with `seconds` a step, `sent` bytes a channel and step; held-out loss falls by 0.5 every ten steps."""
    wire = {"preset": name}
    lines: list[dict] = [
        {"kind": "run", "step": 0, "name": name, "mesh": {"dp": 2, "pp": 2, "schedule": "1F1B", "microbatches": 4},
         "wire": wire, "parameters": 300_000, "samples": 512, "rate": 2e7, **about},
    ]  # fmt: skip
    for step in range(steps + 1):
        time, total = step * seconds, step * sent
        if step:
            errors = {"forward": 0.02, "backward": 0.1, "gradient": 0.5}
            errors = errors if name != "off" else dict.fromkeys(errors, 0.0)
            lines.append({
                "kind": "step", "step": step, "loss": 5.5 - 0.05 * step, "lr": 3e-4, "norm": 1.0, "tokens": 1024,
                "seconds": time, "step_seconds": seconds, "wait_seconds": seconds / 2, "forward_bytes": total,
                "backward_bytes": total, "gradient_bytes": 2 * total, "embedding_bytes": 0, "raw_bytes": RAW * step,
                "hit_rate": float(step > 20) if name == "max" else None, "cold": 16 * (step <= 20),
                "warm": 16 * (step > 20), "skips": 0, "errors": errors,
            })  # fmt: skip
        if step % 10 == 0:
            held_out = final + 0.05 * (steps - step)
            lines.append({"kind": "eval", "step": step, "held_out": held_out, "seconds": time, "bytes": 4 * total})
    memory = {"memory": [150_000_000, 200_000_000]} if name == "max" else {}  # earlier versions recorded none
    return [*lines, {"kind": "end", "step": steps, "seconds": steps * seconds, **memory}]


def write(folder: Path, lines: list[dict], config: str | None = None) -> str:
    folder.mkdir()
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = CONFIG.format(name=lines[0].get("name", "off")) if config is None else config
    if text:
        (folder / "run.toml").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two runs: the compressed one ends a little worse, ten times sooner."""
    folder = tmp_path_factory.mktemp("report")
    off = write(folder / "off", events("off", 3.0, 250_000))
    thin = write(folder / "max", events("max", 0.3, 10_000, final=3.1))
    assert main(["report", off, thin, "--out", str(folder / "page.html"), "--json", str(folder / "r.json")]) == 0
    return folder


def rows(page: str, title: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    table = re.search(rf"<h2>{title}</h2><?.*?(<table.*?</table>)", page, flags=re.S)
    assert table is not None
    return [[cell.text or "" for cell in row] for row in ET.fromstring(table[1]).iter("tr")]


def test_the_tables_numbers(made: Path) -> None:
    """Target 3.1: off is there between steps 30 (3.5) and 40 (3.0), at step 38 = 114 s; max at its end, 12 s."""
    head, off, thin = rows((made / "page.html").read_text(), "Results")
    assert head[4] == "time to loss 3.1"
    assert off == ["off", "40", "120 s", "3", "114 s", "1×", "40.00 MB", "1×", "–"]
    assert thin == ["max", "40", "12 s", "3.1", "12 s", "9.5×", "1.60 MB", "25×", "200.00 MB"]
    sent = rows((made / "page.html").read_text(), "Bytes sent")[2]
    assert sent == ["max", "400.00 kB", "400.00 kB", "800.00 kB", "0 B", "1.60 MB", "40.00 MB"]
    told = json.loads((made / "r.json").read_text())
    assert told["target_loss"] == pytest.approx(3.1) and told["runs"][1]["speedup"] == pytest.approx(9.5)
    assert told["runs"][0]["bytes_to_loss"] == pytest.approx(38e6)


def test_the_page_is_well_formed_and_needs_nothing_else(made: Path) -> None:
    text = (made / "page.html").read_text()
    page = ET.fromstring(text)
    images = list(page.iter("img"))
    assert len(images) == 9 + 2 and all(i.attrib["src"].startswith("data:image/png;base64,") for i in images)
    assert all(i.attrib["alt"] for i in images) and len(list(page.iter("figcaption"))) == len(images)
    assert not list(page.iter("script")) and not list(page.iter("link"))
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert "9.5× faster and 23.8× fewer bytes" in text
    assert "<td>wire.preset</td><td>off</td><td>max</td>" in text and "preset = &quot;max&quot;" in text


def test_figures_lie_beside_the_page(made: Path) -> None:
    names = {path.name for path in made.glob("page-*.png")}
    kinds = (
        "loss-time",
        "loss-bytes",
        "training",
        "progress",
        "tokens",
        "bytes",
        "errors",
        "hit-rate",
        "step-time",
        "timeline-1",
    )
    assert {f"page-{kind}.png" for kind in kinds} <= names
    assert all((made / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_an_exact_run_has_no_error_to_draw(made: Path) -> None:
    runs = read_runs([str(made / "off"), str(made / "max")])
    figure = errors(runs, summarise(runs))
    assert figure is not None and [text.get_text() for text in figure.legends[0].get_texts()] == ["max"]
    assert all(min(line.get_ydata()) > 0 for axes in figure.axes for line in axes.lines)


def test_the_simulated_step_lasts_as_long_as_the_measured(made: Path) -> None:
    for run, seconds in zip(json.loads((made / "r.json").read_text())["runs"], (3.0, 0.3)):
        assert run["simulated"]["step_s"] == pytest.approx(seconds, rel=0.01)
        assert sum(run["simulated"]["critical_path_s"].values()) == pytest.approx(seconds, rel=0.01)


def test_a_run_is_planned_for_another_network(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At its own rate the step is the measured one; a tenth of the rate adds nine times the wire."""
    steps = {}
    for rate in ("20mbit", "2mbit"):
        path = tmp_path / f"{rate}.json"
        assert main(["plan", str(made / "off"), "--rate", rate, "--json", str(path)]) == 0
        steps[rate] = {s["wire"]: s for s in json.loads(path.read_text())["steps"]}
    assert list(steps["20mbit"]) == list(PRESETS)  # the run's own wire is one of them
    own = steps["20mbit"]["off"]
    assert own["step_s"] == pytest.approx(3.0, rel=0.01)
    slow = own["step_s"] + 9 * own["critical_path_s"]["wire"]
    assert steps["2mbit"]["off"]["step_s"] == pytest.approx(slow, rel=0.05)
    (tmp_path / "run.toml").write_text((made / "off" / "run.toml").read_text())
    assert main(["plan", str(tmp_path / "run.toml"), "--rate", "1mbit"]) == 2
    assert "is a run of `thinwire train`" in capsys.readouterr().err


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine to look at the page with")
    return found


def look(page: Path, picture: Path, *options: str) -> Any:
    """The page in a browser, as pixels [height, width, 3]."""
    import numpy as np
    from PIL import Image

    profile = picture.with_suffix(".profile")
    subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
         *options, f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return np.asarray(Image.open(picture).convert("RGB")).astype(int)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_browser_shows_it(made: Path) -> None:
    """Light by default, dark where the reader prefers it (figures too), and never wider than a small window."""
    light = look(made / "page.html", made / "light.png", "--window-size=900,3000")
    assert light.shape == (3000, 900, 3)
    assert (light[:, 2] > 250).all()  # paper at the edge: nothing sticks out
    inked = (light.min(axis=2) < 200).any(axis=1)
    assert inked.mean() > 0.4  # tables and figures all the way down
    dark = look(
        made / "page.html", made / "dark.png", "--window-size=900,3000", "--blink-settings=preferredColorScheme=0"
    )
    assert (dark > 200).all(axis=2).mean() < 0.1  # no white sheets


@pytest.mark.timeout(120)
def test_a_phone_sees_that_tables_go_on(made: Path) -> None:
    """At 400 pixels a line above each wide table says so, and the page itself is no wider than the window."""
    phone = look(made / "page.html", made / "phone.png", "--window-size=400,1200")
    assert (phone[:, :3] > 250).all() and (phone[:, -3:] > 250).all()  # nothing sticks out
    desk = look(made / "page.html", made / "desk.png", "--window-size=1280,1200")
    brown = [((pixels - [154, 75, 0]).__abs__().max(axis=2) < 12).sum() for pixels in (phone, desk)]
    assert brown[0] > 100 and brown[1] == 0, brown


def test_one_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "one", events("safe", 1.0, 60_000, rate=None))
    assert main(["report", run, "--out", str(tmp_path / "p.html")]) == 0
    assert "No timeline: the run did not record the rate" in (tmp_path / "p.html").read_text()
    assert main(["report", run, "--out", str(tmp_path / "p.html"), "--rate", "20mbit"]) == 0
    assert (tmp_path / "p-timeline-1.png").exists()
    text = (tmp_path / "p.html").read_text()
    ET.fromstring(text)
    assert "40 steps in 40 s: held-out loss 3, 9.60 MB sent, 4.17× fewer than fp32 without compression." in text
    assert "No figure: no run keeps activations by sample" in text
    shown = capsys.readouterr().out
    assert "page: " in shown and "Runs on" not in shown


def test_a_long_link_stands_above_the_table_and_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And in its simulated step: what waits for the link is not computing."""
    first, *rest = events("safe", 3.0, 60_000)
    near = write(tmp_path / "near", [first, *rest])
    far = write(tmp_path / "far", [first | {"latency": 0.04, "loss": 0.001}, *rest])
    waits = {}
    for run in (near, far):
        assert main(["report", run, "--out", f"{run}.html", "--json", f"{run}.json"]) == 0
        waits[run] = json.loads(Path(f"{run}.json").read_text())["runs"][0]["simulated"]["critical_path_s"]
    links = "links of 20 Mbit/s, 40 ms one way, 0.1 % of packets lost"
    assert links in Path(f"{far}.html").read_text() and f"Runs on {links}" in capsys.readouterr().out
    assert waits[far]["compute"] < waits[near]["compute"]


def started_from_a_checkpoint(folder: Path, *, ended: bool) -> str:
    """A run whose run.toml was given elsewhere and names a checkpoint there; recorded as by `thinwire train`."""
    text = CONFIG.format(name="off").replace("hidden = 64\nlayers = 4\nheads = 4", 'path = "start/model"')
    given = folder / "given"
    (given / "start" / "model").mkdir(parents=True)
    (given / "run.toml").write_text(text)
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 264, "tie_word_embeddings": True}
    (given / "start" / "model" / "config.json").write_text(json.dumps(sizes))
    (folder / "out").mkdir()
    config = replace(load(given / "run.toml"), run=RunConfig(out=str(folder / "out")))
    record(config, str(given / "run.toml"))
    (folder / "out" / METRICS).write_text("".join(json.dumps(e) + "\n" for e in events("off", 3.0, 250_000)))
    if ended:
        shutil.copytree(given / "start" / "model", folder / "out" / "model")
        shutil.rmtree(given)
    return str(folder / "out")


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_from_a_checkpoint_has_a_simulated_step(ended: bool, tmp_path: Path) -> None:
    """Its sizes are in its own result, or, before its end, where its record says that it started."""
    run = started_from_a_checkpoint(tmp_path, ended=ended)
    assert main(["report", run, "--out", str(tmp_path / "p.html"), "--json", str(tmp_path / "r.json")]) == 0
    step = json.loads((tmp_path / "r.json").read_text())["runs"][0]["simulated"]
    assert step["step_s"] == pytest.approx(3.0, rel=0.01), step
    assert "No timeline" not in (tmp_path / "p.html").read_text()


def captions(page: Path) -> dict[str, str]:
    """Words under the figures, by their titles."""
    figures = ET.fromstring(page.read_text()).iter("figure")
    return {next(f.iter("img")).attrib["alt"]: "".join(next(f.iter("figcaption")).itertext()) for f in figures}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [40, 200])
def test_captions_speak_of_what_is_drawn(steps: int, tmp_path: Path) -> None:
    """A short series is one line, a long one a thin and a thick; one run alone has no ring and no other curve."""
    runs = [write(tmp_path / name, events(name, 1.0, 1000, steps=steps)) for name in ("off", "max")]
    assert main(["report", *runs, "--out", str(tmp_path / "two.html")]) == 0
    two = captions(tmp_path / "two.html")
    assert all(
        ("thick" in two[title]) == (steps == 200) for title in ("Training loss", "Step time", "Compression error")
    )
    assert "rings" in two["Held-out loss against time"] and "two curves" in two["Held-out loss against bytes"]
    drawn = training(read_runs(runs), summarise(read_runs(runs)))
    assert drawn is not None and len(drawn.axes[0].lines) == (2 if steps == 40 else 4)
    assert main(["report", runs[1], "--out", str(tmp_path / "one.html")]) == 0
    alone = " ".join(captions(tmp_path / "one.html").values())
    assert not any(word in alone for word in ("rings", "dashed", "two curves", "lie on each other"))


def test_files_of_before_are_read_and_said_to_be_so(tmp_path: Path) -> None:
    """An earlier version recorded the share of remembered samples since the start, without their numbers."""
    before = [{k: v for k, v in e.items() if k not in ("cold", "warm")} for e in events("max", 1.0, 1000)]
    write(tmp_path / "old", before)
    write(tmp_path / "new", events("max", 1.0, 1000))
    assert [bool(run.notes) for run in read_runs([tmp_path / "old", tmp_path / "new"])] == [True, False]
    assert "since the start, not per step" in read_runs([tmp_path / "old"])[0].notes[0]


MISTAKES = {
    "nowhere": (None, "no such folder"),
    "no metrics": ("", "is no run: it has no metrics.jsonl"),
    "empty": ([""], "has no step and no evaluation yet"),
    "not events": (["hello\n"], "holds no event"),
    "only begun": (['{"kind": "run", "step": 0, "name": "x"}\n'], "has no step and no evaluation yet"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_folder_that_is_no_run_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = MISTAKES[case]
    if content is not None:
        (tmp_path / "run").mkdir()
        if content:
            (tmp_path / "run" / METRICS).write_text(content[0])
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "p.html")]) == 2
    told = capsys.readouterr().err
    assert words in told and len(told.strip().splitlines()) == 1 and not (tmp_path / "p.html").exists()


def test_other_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "a", events("off", 1.0, 10))
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / METRICS).write_bytes(b"\xff\xfe\x00")
    for words, told in (
        ([], "no run given"),
        ([run, run], "given twice"),
        ([run, "--out", str(tmp_path / "page.txt")], "must end in .html"),
        ([run, "--out", "/proc/nowhere/p.html"], "cannot write /proc/nowhere/p.html"),
        ([str(tmp_path / "binary")], "holds no event"),
    ):
        assert main(["report", *words]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("thinwire: ") and told in line


def test_what_is_wrong_with_the_runs_stands_on_the_page(tmp_path: Path) -> None:
    """A file cut off by kill -9, another model, a damaged run.toml, a name that is HTML: notes, not failures."""
    whole = events("off", 1.0, 1000)
    whole[5]["loss"] = math.nan
    good = write(tmp_path / "good", whole, "not [ toml")
    cut = write(tmp_path / "cut", events("<b>&", 1.0, 1000, parameters=7)[:20], "")
    with (tmp_path / "cut" / METRICS).open("a") as file:
        file.write('{"kind": "step", "st')
    assert main(["report", good, cut, "--out", str(tmp_path / "p.html")]) == 0
    text = (tmp_path / "p.html").read_text()
    page = ET.fromstring(text)
    notes = " ".join("".join(item.itertext()) for item in page.iter("li"))
    assert "different models (parameters: off 300000, <b>& 7)" in notes
    assert "<b>&: metrics.jsonl: line 21 cannot be read" in notes and "has not ended" in notes
    assert "off: 1 steps have no finite loss" in notes
    words = "".join(page.itertext())
    assert "No timeline: run.toml is not TOML" in words and "No timeline: the folder has no run.toml" in words


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for seed in ("a", "b"):
        (tmp_path / seed).mkdir()
        write(tmp_path / seed / "max", events("max", 1.0, 1000))
    runs = read_runs([tmp_path / seed / "max" for seed in ("a", "b")])
    assert [run.name for run in runs] == ["max (a/max)", "max (b/max)"]


def test_brackets_in_a_table_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    table("[wire]", ("what [s]",), [("pip install 'thinwire[train]'",)], "[run] out")
    said = capsys.readouterr().out
    assert all(words in said for words in ("[wire]", "what [s]", "thinwire[train]", "[run] out"))


def test_reached_and_smooth() -> None:
    assert reached([(0, 5.0), (10, 4.0), (20, 3.0)], 3.5) == 15
    assert reached([(0, 5.0), (10, 4.0)], 3.5) is None and reached([(7, 3.0)], 3.5) == 7
    assert reached([], 1.0) is None
    points = [(float(i), float(i % 2)) for i in range(800)]
    assert all(0.4 < y < 0.6 for _, y in smooth(points)[20:-20]) and smooth(points[:10]) == points[:10]
