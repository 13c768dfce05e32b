"""A good run, a directory of runs to attack, and every way to read a run."""

import contextlib
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, DrivetrainError, Result, RunConfig, ScalingConfig
from drivetrain_console import main
from drivetrain_console._commands.parser import make_parser

ALL_ATTACKS = os.environ.get("DRIVETRAIN_ATTACKS") == "all"
EXIT_CODES = (0, 1, 2, 3)

Command = Callable[..., tuple[int, str, str]]

# Finding the plugins takes ten times as long as reading a damaged run, and is not what these tests attack.
cached_parser = functools.cache(make_parser)


def train(config: dict[str, Any]) -> None:
    for step in range(1, 4):
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, "weights").write_text("w" * step)
            drivetrain.report({"step": step, "eval": {"loss": 1 / step}}, Checkpoint.from_directory(directory))
    raise ValueError("no such column")


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has failed, with three reports and checkpoints, and the files of a run with worker processes."""
    place = tmp_path_factory.mktemp("runs")
    DataParallelTrainer(
        train,
        train_loop_config={"steps": 3},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(place), verbose=0),
    ).fit(raise_on_failure=False)
    run = place / "run"
    run.joinpath("logs").mkdir(exist_ok=True)
    run.joinpath("logs", "rank_0.log").write_text("hello\n")
    run.joinpath("usage.jsonl").write_text('{"time": 1.5, "ranks": {"0": [0.5, 1000, 1]}}\n')
    run.joinpath(".lock").write_text('{"pid": 4194305, "host": "h", "since": "s", "machine": "m", "token": "t"}')
    return run


@pytest.fixture
def place(good_run: Path, tmp_path: Path) -> Path:
    """A directory with the runs ``good`` and ``hostile``; the latter is for the test to damage."""
    for name in ("good", "hostile"):
        shutil.copytree(good_run, tmp_path / "runs" / name)
        run = tmp_path / "runs" / name / "run.json"
        run.write_text(run.read_text().replace('"name": "run"', f'"name": "{name}"'))
        (tmp_path / "runs" / name / ".lock").unlink()
    return tmp_path / "runs"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs the command in this process, in a directory of its own, and requires a documented exit code."""
    monkeypatch.setattr("drivetrain_console._commands.main.make_parser", cached_parser)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        assert status in EXIT_CODES
        return status, *capsys.readouterr()

    return run


def reading_commands(run: Path, good: Path, target: Path, *, both: bool = True) -> Iterator[list[object]]:
    """Every command that reads a run and ends by itself, as text and, if ``both`` is set, all of them as JSON too."""
    commands: list[list[object]] = [
        ["runs", "list", run.parent],
        ["runs", "show", run],
        ["runs", "plot", run],
        ["runs", "plot", run, "--metric", "eval/loss", "--log"],
        ["runs", "compare", good, run, "--metric", "eval/loss"],
        ["runs", "report", run, "-o", target / "page.html"],
        ["runs", "tail", run, "--no-follow"],
        ["runs", "tail", run, "--no-follow", "-n", "0"],
        ["runs", "tail", run, "--no-follow", "--logs"],
        ["runs", "gc", run.parent, "--dry-run"],
        ["runs", "gc", run.parent, "--keep-last", "1", "--dry-run"],
        ["checkpoints", "list", run],
        ["checkpoints", "verify", run, "--checksums"],
        ["checkpoints", "export", run, "best", target / "best", "--metric", "eval/loss", "--mode", "max"],
        ["stacks", run],
    ]
    for words in commands:
        yield words
        shutil.rmtree(target / "best", ignore_errors=True)
        if both or words[1] in ("list", "show"):
            yield [*words, "--json"]
            shutil.rmtree(target / "best", ignore_errors=True)


def read_in_python(run: Path) -> None:
    """Reads a run through the Python interface; a DrivetrainError is a valid result of each query."""
    result = None
    with contextlib.suppress(DrivetrainError):
        result = Result.from_path(run)
    if result is None:
        return
    queries: list[Callable[[], object]] = [
        lambda: result.best_checkpoints,
        lambda: result.get_best_checkpoint("eval/loss", "min"),
        result._repr_html_,
        lambda: result.metrics_dataframe,
        lambda: [checkpoint.get_metadata() for checkpoint, _ in result.best_checkpoints],
        lambda: [checkpoint.verify() for checkpoint, _ in result.best_checkpoints],
        lambda: [checkpoint._repr_html_() for checkpoint, _ in result.best_checkpoints],
        lambda: [checkpoint.as_directory().__enter__() for checkpoint, _ in result.best_checkpoints],
    ]
    for query in queries:
        with contextlib.suppress(DrivetrainError):
            query()
