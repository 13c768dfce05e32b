"""The texts that the driver prints: results, warnings, names of concurrent runs, and errors about its own process."""

import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import CheckpointConfig, DataParallelTrainer, Result, RunConfig, ScalingConfig
from tests.support import PROCESS_LIMIT_S, Pipe, send_line, wait_for_release


def fit(train: Any, tmp_path: Path, workers: int = 0, **options: Any) -> Result:
    return DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, **options),
    ).fit()


def test_printed_result_shows_what_users_need(tmp_path: Path) -> None:
    result = fit(lambda: drivetrain.report({"eval": {"accuracy": 0.9}, "loss": 0.1}), tmp_path)
    lines = str(result).splitlines()
    assert lines[0] == "Result"
    assert re.fullmatch(rf"  path +{tmp_path}/run", lines[1])
    assert any(re.fullmatch(r"  loss +0.1", line) for line in lines)
    assert re.fullmatch(r"  checkpoints +none", lines[-1])
    assert "Storage(" not in str(result)


def test_printed_result_of_a_failed_run_shows_the_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("mine\x1b[2J")

    with pytest.raises(drivetrain.TrainingFailedError):
        fit(fail, tmp_path)
    printed = str(Result.from_path(tmp_path / "run"))
    assert printed.startswith("Result: failed\n")
    assert "ValueError: mine" in printed
    assert "\x1b" not in printed


def test_stop_metric_that_the_first_report_lacks_is_named_with_the_closest_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(lambda: drivetrain.report({"eval": {"accuracy": 0.9}}), tmp_path, stop={"eval/acuracy": 1.0})
    error = capsys.readouterr().err
    assert "RunConfig(stop=...): the first report has no 'eval/acuracy'. Did you mean 'eval/accuracy'?" in error


def test_score_that_no_rank_reports_is_named_at_the_first_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "model").write_text("")
        for _ in range(2):
            drivetrain.report({"loss": 1.0}, drivetrain.Checkpoint(tmp_path / "files"))
            drivetrain.report({"loss": 1.0})
            print("reported", file=sys.stderr)

    fit(train, tmp_path, checkpoint_config=CheckpointConfig(checkpoint_score_attribute="score"))
    first, _, rest = capsys.readouterr().err.partition("reported\n")
    assert "checkpoint_score_attribute=...): no rank has reported 'score'. Reported: 'loss'" in first
    assert "score" not in rest


def test_reported_metrics_cause_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(lambda: drivetrain.report({"loss": 0.9}), tmp_path, stop={"loss": 1.0})
    fit(lambda: None, tmp_path / "other", stop={"loss": 1.0})
    assert "RunConfig(stop=" not in capsys.readouterr().err


def test_output_of_concurrent_runs_names_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipes = [Pipe(tmp_path / name) for name in ("first_pipe", "second_pipe")]

    def train(config: dict[str, str]) -> None:
        send_line(config["ready"], "ready")
        wait_for_release(config["go"])
        print("hello")

    def trainer(name: str) -> DataParallelTrainer:
        return DataParallelTrainer(
            train,
            train_loop_config={"ready": pipes[0].path, "go": pipes[1].path},
            scaling_config=ScalingConfig(num_workers=1, runtime="local"),
            run_config=RunConfig(name=name, storage_path=tmp_path, verbose=0),
        )

    runs = [trainer(name).start() for name in ("red", "blue")]
    pipes[0].receive(2)
    pipes[1].release(2)
    done = threading.Barrier(1)
    for run in runs:
        run.result()
    done.wait()
    pipes[1].release()
    trainer("alone").fit()
    for pipe in pipes:
        pipe.close()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith("hello")]
    assert lines[-1] == "[rank 0] hello"
    assert "[red rank 0] hello" in lines or "[blue rank 0] hello" in lines


SCRIPT = """
import os, resource, sys
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain.errors import ConfigurationError, ResourceError

storage, soft, hard = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if soft:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
else:
    os.rmdir(os.getcwd())
try:
    DataParallelTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(storage_path=storage, verbose=0, worker_output="none"),
    ).fit()
except (ConfigurationError, ResourceError) as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("trained")
"""


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 0), r"ConfigurationError: \[DT-112\] fit\(\): expected a working directory.* was deleted"),
        ((30, 30), r"ResourceError: \[DT-308\] 4 workers: expected a limit of at least \d+ open files, got 30"),
        ((30, 1_000), "trained"),
    ],
)
def test_state_of_the_process_is_checked_before_the_start(
    tmp_path: Path, limits: tuple[int, int], message: str
) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1_000
    (tmp_path / "directory").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "storage"), *map(str, limits)],
        cwd=tmp_path / "directory",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )
    assert re.match(message, run.stdout), run.stderr
    assert (tmp_path / "storage").exists() == (message == "trained")
