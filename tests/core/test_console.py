import contextlib
import csv
import io
import json
import os
import pty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, Result, RunConfig, ScalingConfig
from drivetrain.console import Console


@contextlib.contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """A terminal as standard error, and a function that tells what is shown on it."""
    controller, device = pty.openpty()
    os.set_blocking(controller, False)

    def shown() -> str:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                data += os.read(controller, 65536)
        return data.decode()

    try:
        with open(device, "w", buffering=1) as stream, contextlib.redirect_stderr(stream):
            yield shown
    finally:
        os.close(controller)


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


def test_lines_are_printed_whole_and_the_status_is_not_shown_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    assert not console.interactive
    console.status("half way")
    console.print("a line")
    console.print("an error", error=True)

    assert capsys.readouterr() == ("a line\n", "an error\n")


def test_status_line_is_redrawn_below_the_lines_that_are_printed() -> None:
    with terminal() as shown:
        console = Console()
        assert console.interactive
        console.status("half way")
        console.print("a line", error=True)
        console.status("")

        clear = "\r\x1b[2K"
        assert shown() == f"{clear}half way{clear}a line\r\nhalf way{clear}"


def test_stream_that_is_closed_or_missing_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", closed)
    console = Console()

    assert not console.interactive
    console.status("half way")
    console.print("a line")
    console.print("a line", error=True)


def test_progress_is_one_line_that_ends_as_the_summary(tmp_path: Path) -> None:
    with terminal() as shown:
        run(tmp_path)
        lines = shown().split("\r\n")

    assert lines[0] == f"run directory: {tmp_path / 'run'}"
    assert lines[-2].rpartition("\x1b[2K")[2].startswith("finished after ")
    assert lines[-2].endswith(" | report 2 | loss 0.25 | step 1 | checkpoint_000002")
    assert lines[-1] == ""
    assert len(lines) == 3, "everything between is drawn on one line"


def test_verbose_2_prints_a_line_for_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, verbose=2)

    lines = [line for line in capsys.readouterr().err.splitlines() if "report" in line]
    assert [line.split(" | ")[1:4] for line in lines[:2]] == [
        ["report 1", "loss 0.3333", "step 0"],
        ["report 2", "loss 0.25", "step 1"],
    ]


def test_part_of_a_line_that_a_killed_run_has_left_is_dropped_when_it_goes_on(tmp_path: Path) -> None:
    result = run(tmp_path, verbose=0)
    file = Path(result.path, "result.json")
    whole = file.read_text()
    file.write_text(whole + '{"loss": 0.1')
    assert Result.from_path(result.path).metrics == json.loads(whole.splitlines()[-1])

    run(tmp_path, verbose=0, resume="must")

    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 0, 1]


def test_metric_that_appears_late_becomes_a_column_of_its_own(tmp_path: Path) -> None:
    def train() -> None:
        drivetrain.report({"a": 1, "text": 'with, "quotes"\nand lines'})
        drivetrain.report({"b": 2})
        drivetrain.report({"a": 3, "b": 4})

    options = {"scaling_config": ScalingConfig(num_workers=0)}
    run_config = RunConfig(name="run", storage_path=tmp_path, verbose=0)
    result = DataParallelTrainer(train, run_config=run_config, **options).fit()

    with Path(result.path, "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["a"], row["b"]) for row in rows] == [("1", ""), ("", "2"), ("3", "4")]
    assert rows[0]["text"] == 'with, "quotes"\nand lines'
