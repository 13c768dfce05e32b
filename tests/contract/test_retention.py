import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import Callback, Checkpoint, CheckpointConfig, CheckpointError, Result
from drivetrain.plugin import Run
from drivetrain.plugin.callbacks import CommittedCheckpoint
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import driver_only
from tests.contract.test_checkpoints import committed_names, directories, files_of, report_files
from tests.support import Pipe, wait_for_release


def scores(result: Result) -> list[Any]:
    return [metrics["score"] for _, metrics in result.best_checkpoints]


def report_scores(config: dict) -> None:
    """Report a checkpoint for each score, and pin the configured ones."""
    for score in config["scores"]:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "score.txt").write_text(str(score))
            checkpoint = Checkpoint.from_directory(directory)
            if score in config.get("pin", ()):
                checkpoint.pin()
            drivetrain.report({"score": score}, checkpoint=checkpoint)


class AtEachCommit(Callback):
    """Calls a function in the driver at each commit, and records the run's checkpoints at that time."""

    def __init__(self, act: Callable[[int, Checkpoint], None]) -> None:
        self._act = act
        self.kept: list[list[int]] = []

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        self.kept.append([int(name.removeprefix("checkpoint_")) for name in committed_names(str(run.path))])
        self._act(checkpoint.number, Checkpoint(run.path / checkpoint.name))


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [5, 7, 3, 9, 4, 1, 8, 2, 6]),
        ({"num_to_keep": 1}, [7, 6]),
        ({"num_to_keep": 1, "keep_last": 3}, [7, 8, 2, 6]),
        ({"num_to_keep": 1, "keep_every": 4}, [7, 9, 2, 6]),
        ({"num_to_keep": 3, "checkpoint_score_attribute": "score"}, [7, 9, 8, 6]),
        ({"num_to_keep": 2, "checkpoint_score_attribute": "score", "checkpoint_score_order": "min"}, [7, 1, 2, 6]),
        (
            {"num_to_keep": 1, "checkpoint_score_attribute": "score", "keep_last": 2, "keep_every": 3},
            [7, 3, 9, 1, 2, 6],
        ),
        ({"num_to_keep": 1, "checkpoint_score_attribute": "never reported", "keep_last": 2}, [7, 2, 6]),
    ],
)
@pytest.mark.parametrize("runtime", ["inprocess", "local"], indirect=True)
def test_checkpoint_is_kept_if_it_matches_a_rule_or_was_pinned(
    runtime: RuntimeUnderTest, rules: dict, kept: list[int]
) -> None:
    result = runtime.fit(
        report_scores,
        {"scores": [5, 7, 3, 9, 4, 1, 8, 2, 6], "pin": [7]},
        workers=1,
        checkpoint_config=CheckpointConfig(**rules),
    )

    assert scores(result) == kept
    assert directories(result.path) == committed_names(result.path)
    for checkpoint, metrics in result.best_checkpoints:
        checkpoint.verify()
        assert checkpoint.is_pinned() == (metrics["score"] == 7)
        assert files_of(checkpoint) == {"score.txt": str(metrics["score"])}


@driver_only
def test_latest_and_best_checkpoint_are_both_available_after_a_resume(
    runtime: RuntimeUnderTest,
) -> None:
    rules = {"checkpoint_config": CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score")}
    runtime.fit(report_scores, {"scores": [1, 9, 2]}, workers=1, **rules)
    result = runtime.fit(report_scores, {"scores": [3, 4]}, workers=1, resume="must", **rules)

    assert scores(result) == [9, 4]
    assert files_of(result.checkpoint) == {"score.txt": "4"}
    assert files_of(result.get_best_checkpoint("score")) == {"score.txt": "9"}
    assert files_of(result.get_best_checkpoint("score", mode="min")) == {"score.txt": "4"}
    assert result.get_best_checkpoint("loss") is None
    with pytest.raises(ValueError, match="'max' or 'min', got 'best'"):
        result.get_best_checkpoint("score", mode="best")
    assert Result.from_path(result.path).best_checkpoints == result.best_checkpoints


@pytest.mark.parametrize("runtime", ["inprocess", "local"], indirect=True)
def test_rules_of_a_resumed_run_apply_to_its_earlier_checkpoints(runtime: RuntimeUnderTest) -> None:
    runtime.fit(report_scores, {"scores": [1, 9, 2, 8, 3]}, workers=1)
    strict = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score")
    result = runtime.fit(report_scores, {"scores": [4]}, workers=1, resume="must", checkpoint_config=strict)

    assert scores(result) == [9, 4]
    assert directories(result.path) == committed_names(result.path)


def report_step_by_step(config: dict) -> None:
    """Report the next checkpoint only when the driver has committed the previous one."""
    for step in range(config["steps"]):
        report_files({"step": step}, {"step.txt": str(step)})
        wait_for_release(config["gate"])


def test_checkpoint_pinned_after_its_commit_is_kept_until_it_is_unpinned(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def act(index: int, checkpoint: Checkpoint) -> None:
        if index == 1:
            checkpoint.pin()
        if index == 3:
            first = Checkpoint(Path(checkpoint.path).with_name("checkpoint_000001"))
            assert first.is_pinned()
            first.unpin()
            assert not first.is_pinned()
        gate.release()

    watcher = AtEachCommit(act)
    result = runtime.fit(
        report_step_by_step,
        {"gate": gate.path, "steps": 5},
        workers=1,
        callbacks=[watcher],
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )

    assert watcher.kept == [[1], [1, 2], [1, 3], [4], [5]]
    assert directories(result.path) == committed_names(result.path) == ["checkpoint_000005"]


def test_checkpoint_is_not_deleted_while_the_driver_or_a_callback_reads_it(
    runtime: RuntimeUnderTest, gate: Pipe
) -> None:
    reading = contextlib.ExitStack()
    read: list[str] = []

    def act(index: int, checkpoint: Checkpoint) -> None:
        if index == 1:
            path = reading.enter_context(checkpoint.as_directory())
            reading.callback(lambda: read.append(Path(path, "step.txt").read_text()))
        if index == 3:
            reading.close()
        gate.release()

    watcher = AtEachCommit(act)
    result = runtime.fit(
        report_step_by_step,
        {"gate": gate.path, "steps": 5},
        workers=1,
        callbacks=[watcher],
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )

    assert read == ["0"]
    assert watcher.kept == [[1], [1, 2], [1, 3], [4], [5]]
    assert directories(result.path) == committed_names(result.path) == ["checkpoint_000005"]


def test_checkpoint_is_not_deleted_while_a_worker_reads_it(runtime: RuntimeUnderTest, gate: Pipe) -> None:
    def train(config: dict) -> str:
        def report_next() -> None:
            report_files({}, {"weights.txt": "1"})
            wait_for_release(config["gate"])

        report_next()
        with drivetrain.get_checkpoint().as_directory() as path:
            report_next()
            with Checkpoint(path).as_directory():
                report_next()
            report_next()
            text = Path(path, "weights.txt").read_text()
        report_next()
        return text

    watcher = AtEachCommit(lambda index, checkpoint: gate.release())
    result = runtime.fit(
        train,
        {"gate": gate.path},
        workers=1,
        callbacks=[watcher],
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )

    assert result.return_value == "1"
    assert watcher.kept == [[1], [1, 2], [1, 3], [1, 4], [5]]
    assert directories(result.path) == committed_names(result.path) == ["checkpoint_000005"]


@pytest.mark.parametrize("runtime", ["inprocess", "local"], indirect=True)
def test_checkpoint_in_use_until_the_end_is_deleted_when_the_run_resumes(runtime: RuntimeUnderTest) -> None:
    rules = {"checkpoint_config": CheckpointConfig(num_to_keep=1)}
    result = runtime.fit(report_scores, {"scores": [1]}, workers=1, **rules)
    checkpoint = result.checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as path:
        again = runtime.fit(report_scores, {"scores": [2, 3]}, workers=1, resume="must", **rules)
        assert Path(path, "score.txt").read_text() == "1"
        assert scores(again) == [1, 3]

    assert scores(runtime.fit(report_scores, {"scores": [4]}, workers=1, resume="must", **rules)) == [4]
    assert directories(result.path) == committed_names(result.path)
    assert not os.path.exists(path)
    with (
        pytest.raises(CheckpointError, match="expected the checkpoint's directory, which does not exist"),
        checkpoint.as_directory(),
    ):
        pass
