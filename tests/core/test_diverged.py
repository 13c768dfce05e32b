"""Checkpoints of a model that has diverged: its metrics are NaN."""

import math
import tempfile
from pathlib import Path

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)

LOSSES = [1.0, 0.5, math.nan]


def diverge_once() -> list[int]:
    """Report the losses with a checkpoint each, and fail after the last one. Return the steps of the second attempt."""
    checkpoint = drivetrain.get_checkpoint()
    done = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            done = int(Path(directory, "done.txt").read_text())
    for step in range(done, len(LOSSES)):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "done.txt").write_text(str(step + 1))
            drivetrain.report({"loss": LOSSES[step]}, checkpoint=Checkpoint.from_directory(directory))
    if drivetrain.get_context().attempt == 0:
        raise RuntimeError("the loss is not finite")
    return list(range(done, len(LOSSES)))


def fit(tmp_path: Path, config: CheckpointConfig) -> Result:
    return DataParallelTrainer(
        diverge_once,
        # The report of a single worker is committed before the worker fails.
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(
            storage_path=tmp_path,
            verbose=0,
            checkpoint_config=config,
            failure_config=FailureConfig(max_failures=1),
            start_timeout_s=120,
        ),
    ).fit()


@pytest.mark.parametrize("attribute", [None, "loss"])
def test_retry_resumes_from_the_latest_finite_checkpoint_if_configured(tmp_path: Path, attribute: str | None) -> None:
    config = CheckpointConfig(
        num_to_keep=1,
        checkpoint_score_attribute=attribute,
        checkpoint_score_order="min",
        resume_from="latest_finite",
    )
    assert fit(tmp_path, config).return_value == [2]


def test_retry_resumes_from_the_latest_checkpoint_by_default(tmp_path: Path) -> None:
    result = fit(tmp_path, CheckpointConfig(num_to_keep=1))

    assert result.return_value == []
    assert [metrics["loss"] for _, metrics in result.best_checkpoints[:1]] == [0.5], "the last good one is kept"


def test_latest_checkpoint_is_used_if_none_is_finite(tmp_path: Path) -> None:
    config = CheckpointConfig(checkpoint_score_attribute="never reported", resume_from="latest_finite")
    assert fit(tmp_path, config).return_value == []
