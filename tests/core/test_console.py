import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, Result, RunConfig, ScalingConfig
from drivetrain._base.console import Console
from drivetrain._runtimes.output import LineEcho, tail_log
from tests.support import DEADLINE_S
from tests.terminal import terminal


def run(tmp_path: Path, **options: object) -> Result:
    def train() -> None:
        for step in range(2):
            (tmp_path / "state").mkdir(exist_ok=True)
            (tmp_path / "state" / "step.txt").write_text(str(step))
            drivetrain.report({"loss": 1 / (step + 3), "step": step}, checkpoint=Checkpoint(tmp_path / "state"))

    return DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, **options),
    ).fit()


def test_without_a_terminal_lines_are_printed_whole_and_no_status_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    assert not console.interactive
    console.status("half way")
    console.print("a line")
    console.print("an error", error=True)

    assert capsys.readouterr() == ("a line\n", "an error\n")


def test_live_lines_are_below_the_printed_output_and_disappear_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        console = Console()
        assert console.interactive
        console.status("half way", "to the end")
        console.print("a line", error=True)
        assert screen() == ["a line", "half way", "to the end"]
        console.bars(["30%\x1b[A"])
        assert screen() == ["a line", "30%", "half way", "to the end"]
        console.bars([])
        console.status()
        console.print("another", error=True)
        assert screen() == ["a line", "another"]


def test_live_lines_leave_output_of_other_code_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, rows=6) as screen:
        console = Console()
        for step in range(5):  # more than there are rows
            console.status(f"step {step}", "below")
            sys.stderr.write(f"\rtheir bar {step}")
            console.status(f"step {step} is running", "below")
            assert screen()[-3:] == [f"their bar {step}", f"step {step} is running", "below"]
            sys.stderr.write(f"\rtheir line {step}\n")
        console.status()
        assert screen() == ["their line 1", "their line 2", "their line 3", "their line 4"]


def test_live_lines_are_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, columns=20) as screen:
        console = Console()
        console.status("x" * 50, "\u5bbd" * 50)
        assert screen() == ["x" * 19, "\u5bbd" * 9]


def test_terminal_without_cursor_movement_shows_whole_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        monkeypatch.setenv("TERM", "dumb")
        console = Console()
        console.status("half way")
        console.print("a line", error=True)
        assert screen() == ["a line"]


def test_closed_or_missing_stream_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", closed)
    console = Console()

    assert not console.interactive
    console.status("half way")
    console.print("a line")
    console.print("a line", error=True)


def test_verbose_2_prints_a_line_for_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, verbose=2)

    lines = [line for line in capsys.readouterr().err.splitlines() if "report" in line]
    assert [line.split(" | ")[1:4] for line in lines[:2]] == [
        ["report 1", "loss 0.3333", "step 0"],
        ["report 2", "loss 0.25", "step 1"],
    ]


def test_partial_line_left_by_a_killed_run_is_dropped_on_resume(tmp_path: Path) -> None:
    result = run(tmp_path, verbose=0)
    file = Path(result.path, "result.json")
    whole = file.read_text()
    file.write_text(whole + '{"loss": 0.1')
    assert Result.from_path(result.path).metrics == json.loads(whole.splitlines()[-1])

    run(tmp_path, verbose=0, resume="must")

    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 0, 1]


def test_metric_that_appears_late_gets_its_own_column(tmp_path: Path) -> None:
    def train() -> None:
        drivetrain.report({"a": 1, "text": 'with, "quotes"\nand lines'})
        drivetrain.report({"b": 2})
        drivetrain.report({"a": 3, "b": 4})

    options = {"scaling_config": ScalingConfig(num_workers=0)}
    run_config = RunConfig(name="run", storage_path=tmp_path, verbose=0)
    result = DataParallelTrainer(train, run_config=run_config, **options).fit()

    with Path(result.path, "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["a"], row["b"] or "") for row in rows] == [("1", ""), ("", "2"), ("3", "4")]
    assert rows[0]["text"] == 'with, "quotes"\nand lines'


class PrintedLines(Console):
    """A console that records what it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: list[str] = []

    def print(self, text: str, *, error: bool = False) -> None:
        self.printed += text.splitlines()

    def bars(self, lines: list[str]) -> None:
        pass


@pytest.mark.parametrize("text", ["x[00:", "\r[00:01<00:02, 3it/s]"])
def test_line_without_an_end_is_shown_in_parts(text: str) -> None:
    console = PrintedLines()
    echo = LineEcho(0, console)
    output = (text * 2_000_000)[:10_000_000]

    for start in range(0, len(output), 1 << 16):
        echo.feed(output[start : start + (1 << 16)].encode())
    echo.finish()

    assert max(map(len, console.printed)) < 200_000
    if not text.startswith("\r"):
        assert "".join(line.removeprefix("[rank 0] ") for line in console.printed) == output


def test_lines_before_a_crash_are_among_the_last_ones_of_a_log(tmp_path: Path) -> None:
    script = """
import os, threading, time
import psutil  # an extension module, which Python names in the log

def abort(depth):
    abort(depth - 1) if depth else os.abort()

for _ in range(5):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
for line in range(40):
    print("line", line, flush=True)
abort(30)
"""
    with open(tmp_path / "rank_0.log", "wb") as log:
        command = [sys.executable, "-X", "faulthandler", "-c", script]
        subprocess.run(command, stdout=log, stderr=log, timeout=DEADLINE_S, check=False)

    assert "Extension modules" in (tmp_path / "rank_0.log").read_text()
    tail = tail_log(tmp_path, 0).splitlines()
    assert len(tail) == 30
    before, after = tail[:16], tail[16:]
    assert before == [f"line {line}" for line in range(24, 40)]
    assert after[:3] == ["Fatal Python error: Aborted", "", after[2]]
    assert after[2].startswith("Current thread 0x")
    assert all(line.endswith(" in abort") for line in after[3:13])
    assert after[13:] == ["  ..."]
