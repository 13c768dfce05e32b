"""Code shared by the callbacks for ``lightning`` and ``pytorch_lightning``: reports of metrics and checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

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
from drivetrain_lightning._resume import Resumption

__all__ = ["ReportCallback"]


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
        checkpoint_upload_mode: CheckpointUploadMode | Literal["sync", "async"] = CheckpointUploadMode.SYNC,
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
        self._is_preempted = self._is_preempted_at_end = self._is_due = False
        self._reported_at = ""
        self.resumption = Resumption()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the trainer, and add a :class:`Checkpoints` callback. Called before all other hooks."""
        if get_context().get_world_size() > 1:
            prepare_trainer(trainer)
        if not any(getattr(other, "owner", None) is self for other in trainer.callbacks):
            trainer.callbacks.append(self._checkpoints(self, trainer, self._report_epoch, self.CHECKPOINT_NAME))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the states of the random number generators of all ranks to a checkpoint that this callback reports."""
        if self._reported_at:
            self.resumption.save(checkpoint, self._reported_at)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Restore the random number generators for the next epoch, before Lightning starts to iterate over the data."""
        self.resumption.load(checkpoint, is_training=trainer.state.fn == "fit")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Store the number of the current step. Called when training starts."""
        self._last_step = trainer.global_step
        self._is_preempted = self._is_preempted_at_end = self._is_due = False
        self.resumption.on_train_start(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note that training has resumed. Called before each batch."""
        self.resumption.on_first_batch(batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report if a report is due. If a preemption is pending, report and stop. Called after each batch."""
        step, last = trainer.global_step, self._last_step
        if step == last:  # no optimizer step was made: gradients are being accumulated
            return
        self._last_step = step
        is_preempted = get_preemption_info() is not None
        if not is_preempted and not (isinstance(self.every, int) and step // self.every > last // self.every):
            return
        if trainer.is_last_batch and not _has_reached_max_steps(trainer):
            # From a checkpoint that is saved here, Lightning would resume with the next epoch, without the validation
            # and the hooks for the end of this one.
            self._is_due = True
            self._is_preempted_at_end = is_preempted
            return
        self.report(trainer, "batch", complete=not is_preempted)
        if is_preempted and not _has_reached_max_steps(trainer):
            self._is_preempted = True
            self._stop(trainer)

    def _stop(self, trainer: Any) -> NoReturn:
        """End the training.

        StopIteration ends the epoch as if there were no more batches. on_train_epoch_end then ends the training.
        should_stop alone would run a validation first, continue until min_epochs, and make other callbacks expect the
        metrics of a whole epoch.
        """
        resume_later()
        trainer.should_stop = True
        raise StopIteration

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report if ``every`` is ``"validation"``. Called after each validation."""
        if self.every == "validation" and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.report(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the training after a preemption. Called after each epoch, before the hook of the ``LightningModule``."""
        if self._is_preempted:
            raise StopIteration

    def _report_epoch(self, trainer: Any) -> None:
        if self.every == "epoch" or self._is_due:
            self.report(trainer, "epoch", complete=not self._is_preempted_at_end)
        self._is_due = False
        if self._is_preempted_at_end and not _is_last_epoch(trainer):
            self._stop(trainer)

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


def _has_reached_max_steps(trainer: Any) -> bool:
    """Return True if the training ends after this step, whether the epoch is complete or not."""
    return bool(0 <= trainer.max_steps <= trainer.global_step)


def _is_last_epoch(trainer: Any) -> bool:
    """Return True if the training ends after this epoch."""
    return _has_reached_max_steps(trainer) or bool(trainer.max_epochs == trainer.current_epoch + 1)
