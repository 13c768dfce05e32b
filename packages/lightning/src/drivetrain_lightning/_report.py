"""Code shared by the callbacks for ``lightning`` and ``pytorch_lightning``: reports of metrics and checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from drivetrain import (
    Checkpoint,
    CheckpointUploadMode,
    ConfigurationError,
    get_context,
    get_preemption_info,
    resume_later,
)
from drivetrain import report as report_to_drivetrain
from drivetrain_lightning._checkpoints import Checkpoints
from drivetrain_lightning._prepare import prepare_trainer
from drivetrain_torch import get_random_states, set_random_states

__all__ = ["ReportCallback"]

_RANDOM_STATES = "drivetrain_random_states"
"""The key in Lightning's checkpoints for the states of the random number generators, and when they were saved."""


class ReportCallback:
    """The implementation of ``RayTrainReportCallback``, without a base class of Lightning.

    For each distribution of Lightning, a subclass adds the base class and sets ``_checkpoints``.
    """

    CHECKPOINT_NAME: ClassVar[str] = "checkpoint.ckpt"
    _checkpoints: ClassVar[type[Checkpoints]]

    def __init__(
        self,
        *,
        every: int | Literal["epoch", "validation"] = "epoch",
        metrics: Sequence[str] | None = None,
        checkpoint_upload_mode: CheckpointUploadMode | str = CheckpointUploadMode.SYNC,
    ) -> None:
        number: object = every
        if every not in ("epoch", "validation") and (type(number) is not int or number < 1):
            raise ConfigurationError(
                "RayTrainReportCallback(every=...): expected 'epoch', 'validation' or a positive number of steps, got "
                f"{every!r}"
            )
        names: object = metrics
        if isinstance(names, (str, Mapping)) or not all(isinstance(name, str) for name in metrics or ()):
            raise ConfigurationError(
                f"RayTrainReportCallback(metrics=...): expected a list of names of metrics, got {metrics!r}"
            )
        if checkpoint_upload_mode not in ("sync", "async"):
            raise ConfigurationError(
                "RayTrainReportCallback(checkpoint_upload_mode=...): expected 'sync' or 'async', got "
                f"{checkpoint_upload_mode!r}"
            )
        self.every = every
        self.metrics = None if metrics is None else tuple(metrics)
        self._mode = checkpoint_upload_mode
        self._last_step = 0
        self._is_preempted = False
        self._reported_at = ""
        self._loaded: Mapping[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the trainer, and add a :class:`Checkpoints` callback. Called before all other hooks."""
        if get_context().get_world_size() > 1:
            prepare_trainer(trainer)
        if not any(getattr(other, "owner", None) is self for other in trainer.callbacks):
            trainer.callbacks.append(self._checkpoints(self, trainer, self._report_epoch, self.CHECKPOINT_NAME))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the states of the random number generators of all ranks to a checkpoint that this callback reports."""
        if self._reported_at:
            checkpoint[_RANDOM_STATES] = {"saved": self._reported_at, "states": get_random_states()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Restore the random number generators for the next epoch, before Lightning starts to iterate over the data."""
        loaded = checkpoint.get(_RANDOM_STATES)
        self._loaded = loaded if trainer.state.fn == "fit" else None
        if self._loaded is not None:
            set_random_states(self._loaded["states"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Store the number of the current step. Called when training starts."""
        self._last_step = trainer.global_step
        self._is_preempted = False
        if self._loaded is not None and self._loaded["saved"] in _saved_before_another_iteration(trainer):
            set_random_states(self._loaded["states"])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before the first batch after a resume within an epoch, restore the random number generators again.

        The data loader may have drawn random numbers on its way to this batch.
        """
        if self._loaded is not None:
            if batch_idx > 0:
                set_random_states(self._loaded["states"])
            self._loaded = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report if a report is due. If a preemption is pending, report and stop. Called after each batch."""
        step, last = trainer.global_step, self._last_step
        if step == last:  # no optimizer step was made: gradients are being accumulated
            return
        self._last_step = step
        if get_preemption_info() is not None:
            self.report(trainer, "batch", complete=False)
            if _is_last_step(trainer):
                return
            resume_later()
            self._is_preempted = trainer.should_stop = True
            # StopIteration ends the epoch as if there were no more batches. on_train_epoch_end then ends the training.
            # should_stop alone would run a validation first, continue until min_epochs, and make other callbacks expect
            # the metrics of a whole epoch.
            raise StopIteration
        if isinstance(self.every, int) and step // self.every > last // self.every:
            self.report(trainer, "batch")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report if ``every`` is ``"validation"``. Called after each validation."""
        if self.every == "validation" and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.report(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the training after a preemption. Called after each epoch, before the hook of the ``LightningModule``."""
        if self._is_preempted:
            raise StopIteration

    def _report_epoch(self, trainer: Any) -> None:
        if self.every == "epoch":
            self.report(trainer, "epoch")

    def report(self, trainer: Any, after: Literal["epoch", "validation", "batch"], *, complete: bool = True) -> None:
        """Save a checkpoint and report it with the metrics. Called on every rank.

        Args:
            trainer: the trainer.
            after: what has just ended.
            complete: raise an error if a metric to report has not been logged. If False, the metric is left out.
        """
        metrics = dict(self._choose(trainer.callback_metrics, complete))
        metrics.update(epoch=trainer.current_epoch, step=trainer.global_step)
        with _shared_directory(trainer.strategy) as (directory, is_reported_here):
            self._reported_at = after
            try:  # on each rank, save_checkpoint returns once all ranks have saved
                trainer.save_checkpoint(os.path.join(directory, self.CHECKPOINT_NAME), weights_only=False)
            finally:
                self._reported_at = ""
            report_to_drivetrain(
                metrics,
                Checkpoint(directory) if is_reported_here and os.listdir(directory) else None,
                checkpoint_upload_mode=self._mode,
                delete_local_checkpoint_after_upload=True,
            )

    def _choose(self, logged: Mapping[str, Any], complete: bool) -> Mapping[str, Any]:
        if self.metrics is None:
            return logged
        if complete and (missing := [name for name in self.metrics if name not in logged]):
            raise ConfigurationError(
                "RayTrainReportCallback(metrics=...): expected metrics that were logged before the report, got "
                f"{', '.join(map(repr, missing))}. Logged: {', '.join(map(repr, logged)) or 'none'}. Call "
                f"self.log({missing[0]!r}, ...) in the LightningModule before the report, or remove the name"
            )
        return {name: logged[name] for name in self.metrics if name in logged}


@contextlib.contextmanager
def _shared_directory(strategy: Any) -> Iterator[tuple[str, bool]]:
    """Yield the path of a directory for all ranks to save to, and True if this rank reports the directory's files.

    The path is the same on all nodes. Nodes whose temporary files are on a shared filesystem have one directory in
    common; every other node has a separate directory. Each node adds a marker to its directory. The markers show which
    nodes share a directory. Of these nodes, the first rank of the first node reports the files.
    """
    context = get_context()
    node, is_first_on_node = context.get_node_rank(), context.get_local_rank() == 0
    root = strategy.broadcast(tempfile.mkdtemp(prefix="drivetrain-lightning-") if strategy.is_global_zero else "")
    files, marks = os.path.join(root, "files"), os.path.join(root, "nodes")
    owns = False
    try:
        for directory in (files, os.path.join(marks, str(node))):
            os.makedirs(directory, exist_ok=True)
        strategy.barrier()
        owns = is_first_on_node and node == min(map(int, os.listdir(marks)))
        yield files, owns
    finally:
        if owns:
            shutil.rmtree(root, ignore_errors=True)


def _saved_before_another_iteration(trainer: Any) -> tuple[str, ...]:
    """Return the kinds of checkpoints from which Lightning resumes by iterating over the data once more than necessary.

    From a checkpoint that was saved after a validation, Lightning first completes the epoch. Versions without
    ``is_resuming`` also start a second iteration if the checkpoint was saved after an epoch. The first iteration has
    drawn random numbers, so the states must be restored again before the second one.
    """
    return ("validation",) if hasattr(trainer.fit_loop, "is_resuming") else ("validation", "epoch")


def _is_last_step(trainer: Any) -> bool:
    """Return True if the training ends after this step."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    return bool(trainer.is_last_batch and trainer.max_epochs == trainer.current_epoch + 1)
