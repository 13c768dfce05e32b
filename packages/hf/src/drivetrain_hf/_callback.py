"""The callback that reports a ``Trainer``'s checkpoints. Its base class is transformers', so only workers import it."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from drivetrain import Checkpoint, Result, get_context, get_preemption_info, report
from drivetrain_hf._arguments import check_arguments, check_logged

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["RayTrainReportCallback"]


class RayTrainReportCallback(TrainerCallback):  # type: ignore[misc]
    """Reports each checkpoint that a ``transformers.Trainer`` saves, with the metrics that belong to it.

    Every rank reports. The checkpoint has all files that the ranks have written, those of rank 0 and the state of every
    rank's random numbers, or with DeepSpeed and FSDP every rank's part, in the folder :attr:`CHECKPOINT_NAME`. Its
    metrics are ``step``, ``epoch``, what the ``Trainer`` has logged last, and those of an evaluation if it was of just
    these weights. When training ends, the latest values are reported once more, with those of the training as a whole
    such as ``train_loss``, and without a checkpoint.

    On a preemption all ranks save at the same step, report, and stop; ``train()`` then returns.

    Attributes:
        CHECKPOINT_NAME: the folder in each checkpoint that ``from_pretrained`` and ``resume_from_checkpoint`` take.

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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks that the arguments fit the run, and has the best checkpoint so far at hand."""
        check_arguments(args)
        self._stopping = False
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            state.best_model_checkpoint = _fetch(state.best_model_checkpoint, args.output_dir)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Notes which metrics are those of an evaluation."""
        self._evaluated.update(metrics or ())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Has the ``Trainer`` save and stop if the run is to end; there may be no time to evaluate first."""
        if get_preemption_info() is not None:
            self._stopping = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keeps the ``Trainer`` from evaluating and saving once more after it was stopped."""
        if self._stopping:
            control.should_save = control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reports the checkpoint that was saved."""
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

        latest = _latest(state)
        metrics = {
            name: value
            for name, (step, value) in latest.items()
            if step == state.global_step or not (name in self._evaluated or name.startswith("eval_"))
        }
        if not self._stopping and state.global_step < state.max_steps:
            # At the end some versions of transformers save first and evaluate then.
            check_logged(metrics, set(latest))
        source = os.path.abspath(os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))
        names = _own_files(source)
        with tempfile.TemporaryDirectory() as directory:
            for name in names:
                link = os.path.join(directory, self.CHECKPOINT_NAME, name)
                os.makedirs(os.path.dirname(link), exist_ok=True)
                os.symlink(os.path.join(source, name), link)
            report(_told(metrics, state), Checkpoint.from_directory(directory) if names else None)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reports what was logged last."""
        report(_told({name: value for name, (_, value) in _latest(state).items()}, state))


def _fetch(best: str, output_dir: str) -> str:
    """A directory with the checkpoint that was saved as ``best``, on whatever node; every rank calls it.

    Without it, a ``Trainer`` that was resumed elsewhere would end with the last model in place of the best.
    """
    context = get_context()
    target = best if os.path.isdir(best) else os.path.join(output_dir, os.path.basename(best))
    if not os.path.isdir(target) and context.get_local_rank() == 0:
        step = best.rpartition("-")[2]
        kept = Result.from_path(context.get_run_dir(), context.get_run_filesystem()).best_checkpoints
        found = [checkpoint for checkpoint, metrics in kept if str(metrics.get("step")) == step]
        if found:
            os.makedirs(output_dir, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=output_dir) as directory:
                found[-1].to_directory(directory, include=[f"{RayTrainReportCallback.CHECKPOINT_NAME}/*"])
                os.rename(os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME), target)
        else:
            warnings.warn(
                f"load_best_model_at_end: expected the best checkpoint so far, got {best} gone and no checkpoint "
                "of step "
                f"{step} kept by this run: unless a better one comes, the last model takes its place. Keep it with "
                "CheckpointConfig(checkpoint_score_attribute=...)",
                stacklevel=2,
            )
    _wait_for_all()
    return target


def _wait_for_all() -> bool:
    """Whether there are other ranks, which have all come here when this returns."""
    import torch.distributed as dist

    together = bool(dist.is_initialized() and dist.get_world_size() > 1)
    if together:
        dist.barrier()
    return together


def _latest(state: TrainerState) -> dict[str, tuple[int, Any]]:
    """What was logged last under each name, and at which step; also by the run that this one continues."""
    return {name: (entry["step"], value) for entry in state.log_history for name, value in entry.items()}


def _told(metrics: dict[str, Any], state: TrainerState) -> dict[str, Any]:
    return {**metrics, "step": state.global_step, "epoch": state.epoch}


def _own_files(directory: str) -> list[str]:
    """The files below a directory that this rank is to report: those that no lower rank has.

    Ranks write into directories of the same name, which is one directory for the ranks of a node, or for all if nodes
    share a filesystem. Every rank calls it.
    """
    import torch.distributed as dist

    together = _wait_for_all()  # others may still be writing
    names = sorted(
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, files in os.walk(directory)
        for name in files
    )
    if not together:
        return names
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    lower: set[str] = set().union(*everyone[: dist.get_rank()])
    return [name for name in names if name not in lower]
