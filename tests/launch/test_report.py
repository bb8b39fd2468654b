"""The report's command line: what is read, what is refused, and what it writes."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_loco.launch import report
from megatron_loco.launch.report_runs import BF16, LOSS, STEP_TIME, VALIDATION_LOSS, WIRE, Run
from tests.launch._logged_run import scalars, write_run, write_scalars, write_settings

PNG = b"\x89PNG\r\n\x1a\n"


def test_side_by_side_and_verdict_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, loco = write_run(tmp_path / "[bold]base"), write_run(tmp_path / "loco", bits=4, loss=2.5)
    assert report.main([str(loco), str(base)]) == 0
    out = capsys.readouterr().out
    assert "│       200 │ 2.5500 │     2.0500 │" in out  # iteration, loco, base: the name is no markup
    assert "[bold]base = baseline" in out  # the run without LoCo, though it is the second
    assert "+0.5000" in out
    assert "4.00 times less" in out  # 4 MB in bf16, 1 MB sent


def test_one_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "loco", bits=4)
    assert report.main([str(run), "--png", str(tmp_path / "a.png"), "--html", str(tmp_path / "a.html")]) == 0
    assert "verdict" not in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    report.print_summary(run, 3.25)
    # 20 of 200 iterations send 8 MB, the others 1 MB: 800 / (160 + 180)
    assert "2.35 times less" in capsys.readouterr().out


def test_a_run_of_one_rank_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_scalars(tmp_path, {LOSS: {10: 2.0}, WIRE: {10: 0.0}, BF16: {10: 0.0}})
    report.print_summary(tmp_path, None)
    output = capsys.readouterr().out
    assert "2.0000" in output
    assert "times less" not in output


def test_a_resumed_run_keeps_the_last_values(tmp_path: Path) -> None:
    # Crashed at 60; resumed at 40, stopped at 50. Nothing of what the first session logged after 40 is left.
    write_scalars(tmp_path / "run", {LOSS: dict.fromkeys(range(1, 61), 1.0), VALIDATION_LOSS: {40: 1.0, 60: 1.0}})
    write_scalars(tmp_path / "run", {LOSS: dict.fromkeys(range(41, 51), 2.0)}, time=5000.0)
    run = Run.read(tmp_path / "run")
    assert run.scalars[LOSS] == {i: 1.0 if i <= 40 else 2.0 for i in range(1, 51)}
    assert run.scalars[VALIDATION_LOSS] == {40: 1.0}
    assert run.restarts == (41,)


def test_a_run_that_was_started_twice_is_the_second(tmp_path: Path) -> None:
    write_scalars(tmp_path / "run", {LOSS: {1: 1.0, 2: 1.0, 3: 1.0}, "lm loss vs samples": {16: 1.0}})
    write_scalars(tmp_path / "run", {LOSS: {1: 2.0, 2: 2.0}, "lm loss vs samples": {16: 2.0}}, time=5000.0)
    run = Run.read(tmp_path / "run")
    assert run.scalars == {LOSS: {1: 2.0, 2: 2.0}, "lm loss vs samples": {16: 2.0}}


def test_bad_folders_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "silent" / "tensorboard").mkdir(parents=True)
    write_scalars(tmp_path / "other", {"accuracy": {1: 0.5}})
    write_scalars(tmp_path / "damaged", {LOSS: {1: 0.5}})
    (tmp_path / "damaged" / "resolved.yaml").write_text("run: [", encoding="utf-8")
    (tmp_path / "a_file").touch()
    for name, message in (
        ("missing", "missing is not a folder"),
        ("a_file", "a_file is not a folder"),
        ("empty", "tensorboard does not exist"),
        ("silent", "holds no scalars"),
        ("other", "holds no 'lm loss'"),
        ("damaged", "resolved.yaml:1: not valid YAML"),
        ("good", "good is given twice"),
    ):
        assert report.main([str(good), str(tmp_path / name)]) == 2, name
        err = capsys.readouterr().err
        assert err.startswith("error: "), name
        assert message in err, name
        assert err.count("\n") == 1, name


def test_bad_outputs_are_one_message_and_come_before_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "missing")  # its own error would come from the reading
    assert report.main([missing, "--png", str(tmp_path / "no" / "a.png")]) == 2
    assert "a.png cannot be written" in capsys.readouterr().err
    assert report.main([missing, "--html", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert report.main([missing, "--html", str(tmp_path / "a"), "--json", str(tmp_path / "a")]) == 2
    assert "different files" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    assert report.main([missing, "--png", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err.endswith("pip install 'megatron-loco[plot]'\n")
    # The rest needs no matplotlib.
    assert report.main([str(write_run(tmp_path / "run")), "--json", str(tmp_path / "a.json")]) == 0


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_escapes_names(tmp_path: Path) -> None:
    # Names that would be markup, a formula of matplotlib, and a label that it leaves out of legends.
    names = ("<script>alert(1)<&\"'", "$x_{$", "_hidden")
    runs = [str(write_run(tmp_path / name, bits=4 if i else "off")) for i, name in enumerate(names[:1])]
    runs += [str(write_run(tmp_path / name, bits=4, loss=2 + 0.1 * i)) for i, name in enumerate(names[1:])]
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    write_settings(tmp_path / "_hidden", bits=8)
    assert report.main([*runs, "--png", str(png), "--html", str(html)]) == 0
    text = html.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.tags
    assert page.tags.count("table") == 3  # verdict, validation losses, settings
    assert [link.partition(",")[0] for link in page.links] == ["data:image/png;base64"]
    assert base64.b64decode(page.links[0].partition(",")[2]) == png.read_bytes()
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace(page.links[0], ""))
    assert "&lt;script&gt;alert(1)&lt;&amp;&quot;&#x27;" in text
    assert "<td>loco.bits</td><td>off</td>" in text


def test_json_holds_the_figures(tmp_path: Path) -> None:
    base, loco = write_run(tmp_path / "base", step=0.3), write_run(tmp_path / "loco", bits=4, wobble=0.01)
    assert report.main([str(base), str(loco), "--json", str(tmp_path / "a.json")]) == 0
    stock, arm = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["arms"]
    assert (stock["name"], stock["baseline"], stock["bytes_per_step"]) == ("base", True, None)
    assert arm["bytes_per_step"] == {"wire": 1e6, "bf16": 4e6, "whole_run": pytest.approx(80 / 34)}
    assert arm["loss"]["iteration"] == 200
    # float32 in the event files: 2.05 +- 1e-7
    assert arm["loss"]["value"] == pytest.approx(2.06, abs=1e-6)
    assert arm["speed_up"]["median"] == pytest.approx(1.5, abs=1e-5)


def test_nan_is_named_and_drawn_around(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_run(tmp_path / "base")
    broken = scalars(loco=True)
    broken[LOSS] |= dict.fromkeys(range(150, 201), math.nan)
    broken[VALIDATION_LOSS] |= {160: math.nan, 180: math.inf, 200: math.nan}
    write_settings(tmp_path / "broken", bits=4)
    write_scalars(tmp_path / "broken", broken)
    files = [tmp_path / f"a.{kind}" for kind in ("png", "html", "json")]
    arguments = [word for path in files for word in (f"--{path.suffix[1:]}", str(path))]
    assert report.main([str(base), str(tmp_path / "broken"), *arguments]) == 0
    assert "broken: its loss is NaN or infinite at iteration 150" in " ".join(capsys.readouterr().out.split())
    _, arm = json.loads(files[2].read_text(encoding="utf-8"))["arms"]
    assert arm["loss"]["value"] is None
    assert arm["loss"]["verdict"] == "not judged: broken has a loss of NaN or infinity at iteration 150"
    assert files[0].read_bytes().startswith(PNG)


def test_the_baseline_may_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off, four, eight = (write_run(tmp_path / name, bits=bits) for name, bits in (("o", "off"), ("f", 4), ("e", 8)))
    for arguments, expected in (
        ([off, four], "o"),
        ([four, off], "o"),
        ([four, eight], "f"),
        ([off, four, "--baseline", four], "f"),
        ([off, four, "--baseline", eight], "e"),
    ):
        assert report.main([str(word) for word in arguments]) == 0
        assert re.findall(r"(\w+) = baseline", capsys.readouterr().out) == [expected], arguments


def test_step_times_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        figures = scalars()
        del figures[STEP_TIME], figures[VALIDATION_LOSS]
        write_scalars(tmp_path / name, figures)
    assert report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--png", str(tmp_path / "a.png")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "set log-timers-to-tensorboard" in out
    assert "no resolved.yaml" in out
    assert "logged no validation loss" in out
