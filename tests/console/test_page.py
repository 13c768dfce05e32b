"""The page of a run: complete, self-contained, and rendered in a real browser if there is one."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Result
from drivetrain._storage.layout import USAGE_FILE
from drivetrain.plugin.drivers import add_note
from drivetrain.runs import RunReader, open_run
from drivetrain_console._views.page import encode, render, write_page
from tests.browser import Browser
from tests.console.conftest import STEPS
from tests.support import local_storage

PHONE = {"width": 390, "height": 800}
LIMIT_S = 2.0


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "new" / "story.html"
    Result.from_path(runs / "story").write_report(path)
    return path


def test_timeline_has_each_attempt_with_its_end_and_workers(story: Result) -> None:
    record = RunReader(story.storage).record()

    kinds = [attempt.failure and attempt.failure["kind"] for attempt in record.history.attempts]
    assert kinds == ["infrastructure", "user error", None]
    assert record.history.attempts[0].resumed_from is None
    assert record.history.attempts[2].resumed_from == 40
    assert all([worker["rank"] for worker in attempt.workers] == [0, 1] for attempt in record.history.attempts)
    times = [time for attempt in record.history.attempts for time in (attempt.began, attempt.ended)]
    assert times == sorted(times)
    assert "no such column: price" in record.history.attempts[1].failure["traceback"]
    assert record.status == "finished"
    assert record.history.environment["packages"]["fsspec"]
    assert {10, 20, 30} <= {entry["iteration"] for entry in record.deleted_checkpoints}


def test_page_is_complete_and_self_contained(page: Path) -> None:
    text = page.read_text()
    data = data_of(text)

    assert data["status"] == "finished"
    assert data["reports"] == {"0": STEPS, "1": STEPS}
    assert {(curve["rank"], curve["metric"]) for curve in data["curves"]} >= {(0, "loss"), (1, "loss")}
    assert [one["files"] for one in data["checkpoints"]] == [2, 2, 2]
    assert all(one["bytes"] > 1000 for one in data["checkpoints"])
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text), "it loads nothing"
    assert "default-src 'none'" in text


def test_text_of_a_run_is_escaped(page: Path) -> None:
    text = page.read_text()
    assert "<script>alert" not in text
    assert text.count("<script") == 2
    assert "<b>bold</b>" in data_of(text)["metrics"]["note"]
    assert "<i>" not in render(encode({"kind": "run", "name": "<i>"}), "<i>")


def test_numbers_that_json_does_not_support_become_strings() -> None:
    assert json.loads(encode({"loss": float("nan"), "all": [float("inf"), 1.0]})) == {
        "loss": "nan",
        "all": ["inf", 1.0],
    }


def test_resource_usage_is_recorded_and_downsampled(tmp_path: Path) -> None:
    lines = [{"time": float(i), "ranks": {"0": [1.0, 1000 + i, 2], "1": [0.5, 10, 1]}} for i in range(1000)]
    (tmp_path / USAGE_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": 3')

    found = RunReader(local_storage(tmp_path)).usage()

    assert [one["rank"] for one in found] == [0, 1]
    assert len(found[0]["time"]) <= 400
    assert found[0]["bytes"][-1] == 1999
    assert set(found[1]["cpus"]) == {0.5}


def test_killed_run_is_distinguished_from_a_finished_one(own_runs: Path) -> None:
    timeline = own_runs / "story" / "timeline.jsonl"
    lines = timeline.read_text().splitlines(keepends=True)
    timeline.write_text("".join(lines[:-2]) + '{"time": 1')  # as after a SIGKILL of the driver

    record = RunReader(local_storage(own_runs / "story")).record()

    assert record.status == "ended"
    assert record.ended is None
    assert record.history.attempts[-1].ended is None
    assert record.duration_s > 0


def test_run_of_an_earlier_version_has_a_page(own_runs: Path, tmp_path: Path) -> None:
    for name in ("timeline.jsonl", "usage.jsonl"):
        (own_runs / "story" / name).unlink(missing_ok=True)

    Result.from_path(own_runs / "story").write_report(tmp_path / "old.html")

    data = data_of((tmp_path / "old.html").read_text())
    assert data["attempts"] == []
    assert len(data["checkpoints"]) == 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_browser_shows_the_page(browser: Browser, page: Path, width: int, dark: bool, tmp_path: Path) -> None:
    browser.set_window(width=width, height=800, dark=dark)
    browser.open(page.as_uri())

    assert browser.messages == [], "the page has errors, or loads resources from elsewhere"
    assert browser.ask("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    shown = browser.ask("document.body.innerText")
    for words in ("story", "finished", "no such column: price", "SIGKILL", "checkpoint_", "Environment", "rank 1"):
        assert words in shown
    red, green, blue = map(int, re.findall(r"\d+", browser.ask("getComputedStyle(document.body).backgroundColor"))[:3])
    assert (red + green + blue < 150) is dark
    assert browser.ask("document.querySelectorAll('svg path').length") > 8
    titles = browser.ask("[...document.querySelectorAll('.charts h3')].map(one => one.textContent)")
    assert {"loss", "step", "throughput: reports per second"} <= set(titles)
    picture = tmp_path / "page.png"
    browser.picture(picture)
    assert picture.stat().st_size > 20_000, "something is drawn"


def test_notes_of_other_programs_are_below_the_timeline_and_do_not_prolong_the_run(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "story"
    shutil.copytree(runs / "story", directory)
    before = open_run(directory).record()
    add_note(directory, "a test", "cut the <b>cable</b>")
    write_page(local_storage(directory), tmp_path / "page.html")

    browser.open((tmp_path / "page.html").as_uri())

    assert browser.messages == []
    shown = browser.ask("[...document.querySelectorAll('td')].map((cell) => cell.textContent)")
    assert shown[1:3] == ["a test", "cut the <b>cable</b>"]
    assert browser.ask("document.querySelector('svg').textContent").count("cut the") == 1
    after = open_run(directory).record()
    assert (after.duration_s, after.last_time) == (before.duration_s, before.last_time)


def test_reader_chooses_ranks_axis_and_scale(browser: Browser, page: Path) -> None:
    browser.set_window()
    browser.open(page.as_uri())
    lines = "document.querySelectorAll('.charts svg path[fill=none]').length"
    press = "[...document.querySelectorAll('button')].find(one => one.textContent === '{}').click()"
    before = browser.ask(lines)

    browser.ask(press.format("rank 1"))
    assert browser.ask(lines) < before
    browser.ask(press.format("rank 1"))
    browser.ask(press.format("by time"))
    assert "s" in browser.ask("document.querySelector('.charts svg text:last-of-type').textContent")
    browser.ask(press.format("log scale"))
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **_middle(browser))

    assert browser.ask("document.querySelectorAll('button[aria-pressed=true]').length") == 4
    assert "rank 0:" in browser.ask("document.querySelector('.tip').textContent")
    assert browser.messages == []


def _middle(browser: Browser) -> dict[str, int]:
    """Return the middle of the chart of the loss, in screen coordinates."""
    chart = (
        "[...document.querySelectorAll('.charts .card')].find(one => one.querySelector('h3').textContent === 'loss')"
    )
    browser.ask(f"{chart}.scrollIntoView()")
    box = browser.ask(f"{chart}.querySelector('svg').getBoundingClientRect().toJSON()")
    return {"x": round(box["x"] + box["width"] / 2), "y": round(box["y"] + box["height"] / 2)}


def test_page_of_a_million_reports_opens_in_time_and_shows_its_single_spike(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "long"
    run.mkdir()
    shutil.copy(runs / "plain" / "run.json", run)
    with (run / "result.json").open("w") as file:
        for i in range(1, 1_000_001):
            loss = 42.5 if i == 543_210 else 1.5
            file.write(f'{{"loss": {loss}, "_timestamp": {i // 500}, "_training_iteration": {i}}}\n')
    Result.from_path(run).write_report(tmp_path / "long.html")
    browser.set_window()

    assert browser.open((tmp_path / "long.html").as_uri()) < LIMIT_S
    assert (tmp_path / "long.html").stat().st_size < 1_000_000
    (curve,) = data_of((tmp_path / "long.html").read_text())["curves"]
    assert max(curve["high"]) == 42.5
    assert curve["count"] == 1_000_000
    assert "1,000,000" in browser.ask("document.body.innerText")
