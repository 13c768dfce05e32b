"""The part of ``RayTrainReportCallback`` that Lightning treats as a checkpoint callback."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from drivetrain import Checkpoint, Result, get_checkpoint, get_context

__all__ = ["Checkpoints"]

_COMMIT_S = 10.0
"""The maximum time in seconds to wait until the last reported checkpoint is committed."""


class Checkpoints:
    """Reports after an epoch, and provides the run's checkpoints to ``trainer.test(ckpt_path="best")``.

    Lightning calls only checkpoint callbacks after the hook of the ``LightningModule`` for the end of an epoch, which
    may still log metrics. ``RayTrainReportCallback`` is not a checkpoint callback itself, because a trainer with
    ``enable_checkpointing=False`` refuses checkpoint callbacks.

    Args:
        owner: the callback that reports.
        trainer: the trainer to which this callback is added.
        report_epoch: called with the trainer after each epoch.
        file_name: the name of Lightning's file in a checkpoint of the run.
    """

    def __init__(self, owner: object, trainer: Any, report_epoch: Callable[[Any], None], file_name: str) -> None:
        self.owner = owner
        self._trainer = trainer
        self._report_epoch = report_epoch
        self._file_name = file_name
        self._path = ""
        self._used = contextlib.ExitStack()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the epoch. Called after each epoch, after the hook of the ``LightningModule``."""
        self._report_epoch(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop using the checkpoint that a test, a validation or a prediction has loaded."""
        self._used.close()

    @property
    def best_model_path(self) -> str:
        """The local path of the best checkpoint of the run; empty if there is none.

        It is the checkpoint with the best value of ``CheckpointConfig(checkpoint_score_attribute=...)``, or else the
        latest one. Lightning reads this attribute on all ranks when a test begins; the ranks then agree on it.
        """
        if self._trainer.state.status == "running" and self._trainer.state.fn != "fit":
            found = _find_best() if self._trainer.is_global_zero else None
            self._path = self._trainer.strategy.broadcast(found or "")
        if not self._path:
            return ""
        self._used.close()
        checkpoint = Checkpoint(self._path, get_context().get_run_filesystem())
        return os.path.join(self._used.enter_context(checkpoint.as_directory()), self._file_name)


def _find_best() -> str | None:
    """Return the path of the best committed checkpoint of this run, once the last reported one is committed."""
    context, reported = get_context(), get_checkpoint()
    deadline = time.monotonic() + _COMMIT_S
    while True:
        result = Result.from_path(context.get_run_dir(), context.get_run_filesystem())
        kept = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
        if reported is None or reported.path in kept or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    config = context.checkpoint_config
    best = None
    if config.checkpoint_score_attribute is not None:
        best = result.get_best_checkpoint(config.checkpoint_score_attribute, config.checkpoint_score_order)
    best = best or result.checkpoint
    return None if best is None else best.path
