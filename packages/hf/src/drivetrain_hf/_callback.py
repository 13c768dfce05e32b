"""The callback that reports the checkpoints of a ``Trainer``.

Its base class is from transformers, so only workers import this module.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from drivetrain import (
    Checkpoint,
    Result,
    get_checkpoint,
    get_context,
    get_preemption_info,
    report,
    resume_later,
)
from drivetrain.plugin.state import random_states, restore_random_states
from drivetrain_hf._arguments import check_arguments, check_logged
from drivetrain_hf._states import read_state, write_state

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["RayTrainReportCallback"]

_STATE = "drivetrain_state"
"""The name of the files in a checkpoint with the random states of the ranks and the positions in their data."""


class RayTrainReportCallback(TrainerCallback):  # type: ignore[misc]
    """Reports each checkpoint that a ``transformers.Trainer`` saves, with the metrics that belong to the checkpoint.

    Every rank reports. The folder :attr:`CHECKPOINT_NAME` in the checkpoint contains the files written by all ranks.
    Usually, rank 0 writes the model and the training state, and every rank writes the state of its random number
    generators and, after :func:`~drivetrain_hf.transformers.prepare_trainer`, its position in the
    data. With DeepSpeed or FSDP, every rank writes its part of the model.

    The metrics are ``step``, ``epoch`` and the values that the ``Trainer`` logged last. The values of an evaluation are
    included only if it ran at the same step as the checkpoint, and therefore with the same weights. When training ends,
    the latest values are reported once more without a checkpoint, together with values of the whole training such as
    ``train_loss``.

    On a preemption, all ranks save at the same step, report and stop. ``train()`` then returns, and the run is resumed
    after the train function has returned (:func:`drivetrain.resume_later`).

    Attributes:
        CHECKPOINT_NAME: the name of a folder in each checkpoint. Pass the path of this folder to ``from_pretrained`` or
            ``resume_from_checkpoint``.

    Example:
        In a train function::

            trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
            trainer.add_callback(RayTrainReportCallback())
            trainer = prepare_trainer(trainer)
            trainer.train()
    """

    CHECKPOINT_NAME = "checkpoint"

    def __init__(self) -> None:
        self._evaluated: set[str] = set()
        self._stopping = False
        self._loader: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the arguments fit the run, and make the best checkpoint so far available locally."""
        check_arguments(args)
        self._stopping = False
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            state.best_model_checkpoint = _fetch(state.best_model_checkpoint, args.output_dir)
        self._loader = _as_prepared(kwargs.get("train_dataloader"))
        if self._loader is not None and state.global_step:
            # The Trainer does not pass the number of the epoch to a loader of which it skips batches.
            steps = -(-len(self._loader) // args.gradient_accumulation_steps)
            self._loader.set_epoch(state.global_step // steps)
            if not args.ignore_data_skip:
                _resume(self._loader, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before the first step in the middle of an epoch, restore the random states after its batch was loaded.

        The ``Trainer`` has restored those of the checkpoint, which was saved before this batch was loaded.
        """
        if self._loader is not None and (states := self._loader.take_random_states()) is not None:
            restore_random_states(states)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the names of the metrics that come from an evaluation."""
        self._evaluated.update(metrics or ())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """On a preemption, make the ``Trainer`` save and stop, without an evaluation, which may take too long.

        After the last step, the training is complete.
        """
        if get_preemption_info() is not None and state.global_step < state.max_steps:
            resume_later()
            self._stopping = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After a preemption, prevent the ``Trainer`` from evaluating and saving again."""
        if self._stopping:
            control.should_save = control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the checkpoint that the ``Trainer`` has saved."""
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

        latest = _latest_entries(state)
        metrics = {
            name: value
            for name, (step, value) in latest.items()
            if step == state.global_step or not (name in self._evaluated or name.startswith("eval_"))
        }
        if not self._stopping and state.global_step < state.max_steps:
            # At the last step, some versions of transformers save before they evaluate.
            check_logged(metrics, set(latest))
        source = os.path.abspath(os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))
        if self._loader is not None and os.path.isdir(source):
            position = {"loader": self._loader.inner.state_dict(), "length": len(self._loader)}
            write_state(source, _STATE, {"step": state.global_step, "random": random_states(), **position})
        names = _own_files(source)
        with tempfile.TemporaryDirectory() as directory:
            for name in names:
                link = os.path.join(directory, self.CHECKPOINT_NAME, name)
                os.makedirs(os.path.dirname(link), exist_ok=True)
                os.symlink(os.path.join(source, name), link)
            report(_with_progress(metrics, state), Checkpoint.from_directory(directory) if names else None)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the values that were logged last, without a checkpoint."""
        report(_with_progress({name: value for name, (_, value) in _latest_entries(state).items()}, state))


def _as_prepared(loader: Any) -> Any:
    """Return a loader that ``prepare_trainer`` has made resumable; None for another one."""
    from drivetrain_hf._loading import TrainerLoader

    return loader if isinstance(loader, TrainerLoader) else None


def _resume(loader: Any, step: int) -> None:
    """Continue in the middle of an epoch if the ``Trainer`` has loaded the checkpoint that the run received.

    At the start of an epoch, the ``Trainer`` restores the random states itself.
    """
    if (checkpoint := get_checkpoint()) is None:
        return
    with checkpoint.as_directory() as directory:
        path = os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME)
        saved, is_own = read_state(path, _STATE, ("step", "random", "loader", "length"))
    # With another number of batches in an epoch, the Trainer continues at a place that the workers have not reached.
    if saved is None or saved["step"] != step or saved["length"] != len(loader):
        return
    if 0 < saved["loader"]["batches"] < len(loader):
        loader.resume(saved["loader"], saved["random"] if is_own else {})


def _fetch(best: str, output_dir: str) -> str:
    """Make the best checkpoint so far available on this node, and return its local directory.

    Every rank must call this function. Without it, a ``Trainer`` that is resumed on another node would not find its
    best model at the end of the training, and would use the last model instead.

    Args:
        best: the directory in which the checkpoint was saved, possibly on another node.
        output_dir: the directory in which this run's ``Trainer`` saves checkpoints.

    Returns:
        The local directory. If the run has not kept the checkpoint, this directory does not exist; a warning says so.
    """
    context = get_context()
    target = best if os.path.isdir(best) else os.path.join(output_dir, os.path.basename(best))
    if not os.path.isdir(target) and context.get_local_rank() == 0:
        step = best.rpartition("-")[2]
        kept = Result.from_path(context.get_run_dir(), context.get_run_filesystem()).best_checkpoints
        matching = [checkpoint for checkpoint, metrics in kept if str(metrics.get("step")) == step]
        if matching:
            os.makedirs(output_dir, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=output_dir) as directory:
                matching[-1].to_directory(directory, include=[f"{RayTrainReportCallback.CHECKPOINT_NAME}/*"])
                os.rename(os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME), target)
        else:
            warnings.warn(
                f"load_best_model_at_end: expected the best checkpoint so far at {best}, which does not exist, and "
                f"this run has not kept the checkpoint of step {step}. Unless a later checkpoint is better, the last "
                "model is used instead. Keep the best checkpoint with CheckpointConfig(checkpoint_score_attribute=...)",
                stacklevel=2,
            )
    _wait_for_all()
    return target


def _wait_for_all() -> bool:
    """Wait until all ranks have called this function; return True if there is more than one rank."""
    import torch.distributed as dist

    together = bool(dist.is_initialized() and dist.get_world_size() > 1)
    if together:
        dist.barrier()
    return together


def _latest_entries(state: TrainerState) -> dict[str, tuple[int, Any]]:
    """Return, for each logged name, the step and the value of its last entry.

    This includes entries of the run that this run continues.
    """
    return {name: (entry["step"], value) for entry in state.log_history for name, value in entry.items()}


def _with_progress(metrics: dict[str, Any], state: TrainerState) -> dict[str, Any]:
    return {**metrics, "step": state.global_step, "epoch": state.epoch}


def _own_files(directory: str) -> list[str]:
    """Return which files below a directory this rank must report: the files that no lower rank has.

    All ranks write into a directory with this path. Ranks on the same node or on a shared filesystem see the same
    directory, and therefore the same files. Every rank must call this function.
    """
    import torch.distributed as dist

    together = _wait_for_all()  # other ranks may still be writing
    names = sorted(
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, files in os.walk(directory)
        for name in files
    )
    if not together:
        return names
    names_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, names)
    lower: set[str] = set().union(*names_by_rank[: dist.get_rank()])
    return [name for name in names if name not in lower]
