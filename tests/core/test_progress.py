"""The progress display: on terminals of two widths, with and without rich, without a terminal, and in a notebook."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Callback,
    ConfigurationError,
    DataParallelTrainer,
    RunCancelledError,
    RunConfig,
    ScalingConfig,
)
from drivetrain._base.console import Console
from drivetrain._base.outcome import RunOutcome, outcome_of
from drivetrain._runtimes.output import LineEcho
from drivetrain.runs import RunReader
from drivetrain_console import ProgressCallback
from tests.support import PROCESS_LIMIT_S, local_storage
from tests.terminal import watch

SCRIPT = """
import os, pathlib, shutil, sys, tempfile, time
import drivetrain
import drivetrain_console._progress.panel  # imported in advance, so that the panel appears without delay
from drivetrain import Callback, Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig

def wait_until_seen(what):
    directory = os.environ.get("SEEN")  # the test writes a file to it once the screen shows what is waited for
    deadline = time.monotonic() + 20
    while directory and not os.path.exists(os.path.join(directory, what)) and time.monotonic() < deadline:
        time.sleep(0.02)

def upload_slowly(checkpoint, name):
    wait_until_seen("upload")
    target = pathlib.Path(drivetrain.get_context().get_run_dir(), name)
    shutil.copytree(checkpoint.path, target, dirs_exist_ok=True)
    return Checkpoint(target)

def train(config):
    from tqdm import tqdm

    for epoch in range(config["epochs"]):
        for batch in tqdm(range(10), desc=f"epoch {epoch}", mininterval=0):
            step = epoch * 10 + batch + 1
            drivetrain.report({"epoch": epoch, "step": step, "loss": 1 / step, "accuracy": step / 100, "lr": 0.1})
            time.sleep(0.08)  # the displayed pace is tested
            if step == 5:
                wait_until_seen("bar")
            if step == 15:  # the first checkpoint is committed while the panel is visible
                manifest = pathlib.Path(drivetrain.get_context().get_run_dir(), "manifest.json")
                deadline = time.monotonic() + 20
                while "checkpoint_" not in manifest.read_text() and time.monotonic() < deadline:
                    time.sleep(0.02)
                wait_until_seen("checkpoint")
        print(f"epoch {epoch} is done")
        directory = tempfile.mkdtemp(dir=".")
        pathlib.Path(directory, "x").write_text("x")
        drivetrain.report(
            {"epoch": epoch, "step": step, "loss": 1 / step},
            checkpoint=Checkpoint(directory),
            checkpoint_upload_mode="async",
            checkpoint_upload_fn=upload_slowly,
        )

class OwnBar(Callback):
    def on_run_start(self, run):
        from tqdm import tqdm

        self.bar = tqdm(total=22, desc="own bar", ncols=60, mininterval=0, file=sys.stderr)

    def on_report(self, run, report):
        if report.rank == 0:
            self.bar.update()

    def on_run_end(self, run, error):
        self.bar.close()

DataParallelTrainer(
    train,
    train_loop_config={"epochs": 2, "max_steps": 20},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="digits",
        storage_path="runs",
        callbacks=[OwnBar()] if "own" in sys.argv[0] else [],
        worker_output="all",
        verbose=VERBOSE,
    ),
).fit()
"""


BAR = r"^\[rank 0\] epoch 0:  [3-9]0%"
UPLOAD = r"1 upload in flight"
CHECKPOINT = r"^\u2502 checkpoint_000011"


def script(directory: Path, name: str = "train.py", *, verbose: int = 1, prefix: str = "") -> Path:
    path = directory / name
    path.write_text(prefix + SCRIPT.replace("VERBOSE", str(verbose)))
    return path


def find(pattern: str, screens: list[list[str]]) -> list[str]:
    """Return the first screen with a line that matches the pattern."""
    found = next((lines for lines in screens if any(re.search(pattern, line) for line in lines)), None)
    assert found is not None, "\n".join(screens[len(screens) // 2])
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[list[str]], list[str]]]:
    """The screens of terminals of two widths while a run is in progress, and the last screen."""

    def watch_run(columns: int) -> tuple[list[list[str]], list[str]]:
        directory = tmp_path_factory.mktemp("run")
        patterns = {"bar": BAR, "upload": UPLOAD, "checkpoint": CHECKPOINT}

        def on_screen(lines: list[str]) -> None:
            for what, pattern in patterns.items():
                if any(re.search(pattern, line) for line in lines):
                    (directory / what).touch()

        environment = {"SEEN": str(directory)}
        return watch(script(directory), columns=columns, environment=environment, on_screen=on_screen)

    return {columns: watch_run(columns) for columns in (80, 200)}


@pytest.mark.parametrize("columns", [80, 200])
def test_panel_shows_progress_speed_and_stored_checkpoints(columns: int, seen: Any) -> None:
    screens, last = seen[columns]

    assert all(len(line) < columns or not line.startswith(("\u256d", "\u2502")) for lines in screens for line in lines)
    find(r"^\u256d\u2500 digits \u00b7 2 workers \u00b7 \d+:\d\d \u2500+\u256e$", screens)
    find(r"\d+% epoch [12]/2 \u00b7 step \d+/20 \u00b7 [\d.]+ steps/s \u00b7 \d+:\d\d left +\u2502$", screens)
    moved = find(r"loss 0\.\d+ \u2193  accuracy 0\.\d+ \u2191", screens)
    assert not any("lr" in line for line in moved), "a constant metric is shown"
    find(UPLOAD, screens)
    find(CHECKPOINT, screens)
    assert not any(re.search(r"\u256d|\u2502", line) for line in last), "the panel is still visible at the end"
    assert "finished after" in "".join(last)


def test_bars_of_rank_0_are_live_and_their_final_state_is_printed_among_its_lines(seen: Any) -> None:
    screens, last = seen[200]

    find(BAR, screens)
    ours = [line.split("|")[0].rstrip() for line in last if line.startswith("[rank 0]")]
    assert ours == [
        "[rank 0] epoch 0: 100%",
        "[rank 0] epoch 0 is done",
        "[rank 0] epoch 1: 100%",
        "[rank 0] epoch 1 is done",
    ]
    others = {line for lines in screens for line in lines if line.startswith("[rank 1]")}
    assert others <= {"[rank 1] epoch 0 is done", "[rank 1] epoch 1 is done"}


def test_progress_without_rich_is_one_line(tmp_path: Path) -> None:
    without = "import sys, importlib.util as util\nfind = util.find_spec\n"
    without += "util.find_spec = lambda name, package=None: None if name == 'rich' else find(name, package)\n"
    screens, _ = watch(script(tmp_path, prefix=without), columns=200)

    find(
        r"^2 workers \| epoch [12]/2 \| step \d+/20 \| [\d.]+ steps/s \| \d+:\d\d left \| loss 0\.\d+ \u2193 \|",
        screens,
    )
    assert not any("\u2502" in line for lines in screens for line in lines)


def test_progress_bar_of_the_user_in_the_driver_stays_one_line(tmp_path: Path) -> None:
    screens, last = watch(script(tmp_path, "own.py"), columns=100)

    find(r"^own bar:  \d\d%", screens)
    assert max(sum(line.startswith("own bar") for line in lines) for lines in screens) == 1
    assert sum(line.startswith("own bar") for line in last) == 1


def test_nothing_is_shown_when_progress_is_disabled(tmp_path: Path) -> None:
    screens, last = watch(script(tmp_path, verbose=0), columns=80)
    assert not any("digits" in line or "finished" in line for lines in [*screens, last] for line in lines)


def test_without_a_terminal_progress_is_plain_lines_and_finished_bars(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(script(tmp_path))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=True,
    )
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\r" not in ended.stdout + ended.stderr
    assert [line for line in ended.stdout.splitlines() if "%" in line and "100%" not in line] == []
    first, *_, last = ended.stderr.splitlines()
    assert first.endswith("run directory: runs/digits") or "runs/digits" in first
    assert last.startswith("finished after ")


def test_plain_lines_come_at_intervals(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class UntilTwoLines(Callback):
        def on_report(self, run: Any, report: Any) -> None:
            self.console: Console = run.console

    def train() -> None:
        for step in range(8):
            drivetrain.report({"step": step + 1, "loss": 1 / (step + 1)})
            time.sleep(0.15)

    started = time.monotonic()
    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run", storage_path=tmp_path, callbacks=[ProgressCallback(total={"step": 8}, interval_s=0.3)]
        ),
    ).fit()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("in this process | step")]
    assert 1 <= len(lines) <= 1 + (time.monotonic() - started) / 0.3
    assert re.fullmatch(r"in this process \| step \d/8 \|.* loss [\d.]+.*", lines[-1])


class RecordingConsole(Console):
    """A console that records its output."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: list[str] = []
        self.live: list[str] = []

    def print(self, text: str, *, error: bool = False) -> None:
        self.printed += text.splitlines()

    def bars(self, lines: Any) -> None:
        self.live = list(lines)


NESTED = """
from tqdm import tqdm
for epoch in tqdm(range(2), desc="epochs", position=0, mininterval=0):
    for step in tqdm(range(3), desc="steps", position=1, leave=False, mininterval=0):
        pass
    tqdm.write("written next to the bars")
    print("printed", flush=True)
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("size", [1, 7, 50, 100_000])
def test_nested_bars_are_tracked_however_their_output_is_split(size: int, rank: int) -> None:
    written = subprocess.run(
        [sys.executable, "-u", "-c", NESTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        timeout=PROCESS_LIMIT_S,
    ).stdout
    console = RecordingConsole()
    echo = LineEcho(rank, console)
    maximum = 0
    for place in range(0, len(written), size):
        echo.feed(written[place : place + size])
        maximum = max(maximum, len(console.live))
    echo.finish()

    lines = [line.split("|")[0].removeprefix(f"[rank {rank}] ") for line in console.printed]
    expected = ["written next to the bars", "printed", "written next to the bars", "printed"]
    assert lines == (expected if rank else [*expected, "epochs: 100%"])
    assert console.live == []
    assert maximum == (0 if rank else 2) or size == 100_000


def test_foreign_line_ends_and_split_characters_are_shown_whole() -> None:
    console = RecordingConsole()
    echo = LineEcho(0, console)
    for byte in "caf\u00e9\r\n\nlast".encode():
        echo.feed(bytes([byte]))
    echo.finish()
    assert console.printed == ["[rank 0] caf\u00e9", "[rank 0] ", "[rank 0] last"]


def test_notebook_shows_a_single_output_that_is_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    cell = nbformat.v4.new_code_cell(script(tmp_path).read_text())
    notebook = nbformat.v4.new_notebook(cells=[cell])
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(notebook, timeout=PROCESS_LIMIT_S, resources={"metadata": {"path": str(tmp_path)}}).execute()

    kinds = [output.output_type for output in cell.outputs]
    assert kinds.count("display_data") == 1
    text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    assert "\r" not in text
    assert "finished after" in text
    assert text.count("epoch 0: 100%") == 1


@pytest.mark.parametrize("wrong", [{"total": 3}, {"total": {"step": "3"}}, {"interval_s": 0}])
def test_arguments_of_the_progress_callback_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        ProgressCallback(**wrong)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, RunOutcome.FINISHED),
        (KeyboardInterrupt(), RunOutcome.INTERRUPTED),
        (SystemExit(143), RunOutcome.INTERRUPTED),
        (RunCancelledError("cancelled"), RunOutcome.INTERRUPTED),
        (drivetrain.TrainingFailedError("failed", kind=drivetrain.FailureKind.HANG), RunOutcome.FAILED),
        (drivetrain.CallbackError("in on_run_end"), RunOutcome.FAILED),
    ],
)
def test_outcome_is_determined_by_the_error_alone(error: BaseException | None, outcome: RunOutcome) -> None:
    assert outcome_of(error) is outcome


def test_cancelled_run_is_interrupted_on_the_console_and_in_the_timeline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = threading.Event()

    class Starts(Callback):
        def on_report(self, run: Any, report: Any) -> None:
            started.set()

    def train() -> None:
        while True:
            drivetrain.report({"step": 1})

    run = DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[Starts()]),
    ).start()
    assert started.wait(30)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(30)

    shown = capfd.readouterr().err
    assert re.search(r"interrupted after [\d.]+ s", shown)
    assert "failed after" not in shown
    assert RunReader(local_storage(tmp_path / "run")).record().status == "interrupted"
