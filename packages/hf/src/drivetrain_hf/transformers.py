"""Transformers' ``Trainer`` in a drivetrain run.

Importing this module does not import transformers: a worker does, once it needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain import Checkpoint, ConfigurationError, RunConfig, ScalingConfig, get_checkpoint, get_context
from drivetrain_hf._arguments import check_arguments
from drivetrain_hf._frameworks import require
from drivetrain_torch import TorchConfig, TorchTrainer

if TYPE_CHECKING:
    from drivetrain_hf._callback import RayTrainReportCallback

__all__ = ["RayTrainReportCallback", "TransformersTrainer", "prepare_trainer"]

T = TypeVar("T")


def __getattr__(name: str) -> Any:
    if name == "RayTrainReportCallback":  # derives from a class of transformers
        require("transformers")
        from drivetrain_hf._callback import RayTrainReportCallback

        return RayTrainReportCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def prepare_trainer(trainer: T) -> T:
    """Checks that a ``transformers.Trainer`` is part of this run, and makes it fit for several workers.

    Progress bars and printed logs stay on rank 0. Training and evaluation data that can only be iterated over, and is
    no dataset of torch, is taken for batches that are this worker's own: the ``Trainer`` passes them to the model as
    they are, and neither batches nor shards them. It needs ``TrainingArguments(max_steps=...)``.

    Args:
        trainer: made in the train function, on every worker; prepare it before its ``train()``.

    Returns:
        The same trainer.

    Raises:
        ConfigurationError: it is no ``Trainer``; it would train alone instead of with the other workers, or without
            DeepSpeed or FSDP though asked for; there is no ``max_steps`` for data without a length; or the run ranks
            checkpoints by a metric that is not evaluated when they are saved.
        PluginError: transformers is not installed.
        SessionError: called outside a train function.
    """
    require("transformers")
    import transformers

    made: Any = trainer
    if not isinstance(made, transformers.Trainer):
        raise ConfigurationError(f"prepare_trainer wants a transformers.Trainer, found {trainer!r}")
    check_arguments(made.args)
    if get_context().get_world_rank() != 0:
        for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
            made.remove_callback(callback)
        transformers.utils.logging.disable_progress_bar()  # those of loading and saving
    if _is_batches(made.train_dataset):
        if made.args.max_steps <= 0:
            raise ConfigurationError(
                "prepare_trainer wants TrainingArguments(max_steps=...) for data that can only be iterated over, found "
                f"max_steps={made.args.max_steps}: say after how many optimizer steps to stop"
            )
        made.get_train_dataloader = lambda: _pass_on(made.train_dataset)
    of_datasets = made.get_eval_dataloader

    def get_eval_dataloader(eval_dataset: Any = None) -> Any:
        data = made.eval_dataset if eval_dataset is None else eval_dataset
        data = made.eval_dataset[data] if isinstance(data, str) else data
        return _pass_on(data) if _is_batches(data) else of_datasets(eval_dataset)

    made.get_eval_dataloader = get_eval_dataloader
    return trainer


def _is_batches(data: object) -> bool:
    import torch

    is_dataset = hasattr(data, "__getitem__") or isinstance(data, torch.utils.data.Dataset)
    return hasattr(data, "__iter__") and not is_dataset


def _pass_on(batches: Any) -> Any:
    from torch.utils.data import DataLoader

    from drivetrain_hf._batches import Batches

    return DataLoader(Batches(batches), batch_size=None)


@dataclass(frozen=True)
class _TrainFunction:
    """Makes a ``Trainer`` and trains it, from the latest checkpoint if there is one."""

    init: Callable[..., Any]
    datasets: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, config: dict[str, Any]) -> None:
        require("transformers")
        from drivetrain_hf._callback import RayTrainReportCallback

        trainer = self.init(self.datasets.get("train"), self.datasets.get("evaluation"), **config)
        trainer = prepare_trainer(trainer)
        if not any(isinstance(used, RayTrainReportCallback) for used in trainer.callback_handler.callbacks):
            trainer.add_callback(RayTrainReportCallback())
        with contextlib.ExitStack() as stack:
            path = None
            if (checkpoint := get_checkpoint()) is not None:
                directory = stack.enter_context(checkpoint.as_directory())
                path = os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.train(resume_from_checkpoint=path)


class TransformersTrainer(TorchTrainer):
    """Trains what a function makes of a ``transformers.Trainer`` on every worker.

    This is the older way. With a :class:`~drivetrain_torch.TorchTrainer` the train function is your own, and calls
    :func:`prepare_trainer` and ``train()`` itself; this trainer does both for you, adds a
    :class:`RayTrainReportCallback`, and goes on from the latest checkpoint.

    Args:
        trainer_init_per_worker: takes the training data, the evaluation data and the config's values as keyword
            arguments, and returns a ``transformers.Trainer``; called on every worker.
        trainer_init_config: those values.
        torch_config: how the process group is set up.
        scaling_config: how many workers, with what.
        run_config: where results are kept, how the run is watched, and when it ends.
        datasets: under ``"train"`` and ``"evaluation"`` what is passed to the function, pickled to every worker; None
            is passed for what is missing.
        metadata: what ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` give back.
        resume_from_checkpoint: a checkpoint of a :class:`RayTrainReportCallback` to start a new run from.

    Raises:
        ConfigurationError: an argument is of the wrong type, or a dataset has another name.
    """

    def __init__(
        self,
        trainer_init_per_worker: Callable[..., Any],
        *,
        trainer_init_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if not callable(trainer_init_per_worker):
            raise ConfigurationError(
                f"TransformersTrainer(trainer_init_per_worker=...) wants a function, found {trainer_init_per_worker!r}"
            )
        if unknown := sorted(set(datasets or ()) - {"train", "evaluation"}):
            raise ConfigurationError(
                "TransformersTrainer(datasets=...) wants 'train' and 'evaluation', found "
                f"{', '.join(map(repr, unknown))}: rename it, or load it in trainer_init_per_worker"
            )
        super().__init__(
            _TrainFunction(trainer_init_per_worker, dict(datasets or {})),
            train_loop_config=trainer_init_config,
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    @classmethod
    def restore(  # type: ignore[override]
        cls,
        path: str | os.PathLike[str],
        trainer_init_per_worker: Callable[..., Any] | None = None,
        storage_filesystem: Any | None = None,
        **arguments: Any,
    ) -> TorchTrainer:
        """A trainer that continues a run: see :meth:`drivetrain.DataParallelTrainer.restore`.

        Args:
            path: the run directory.
            trainer_init_per_worker: in place of the stored function and its datasets.
            storage_filesystem: the filesystem that ``path`` is on; None for the one it names.
            arguments: the trainer's other arguments, each in place of the stored one; ``datasets`` only along with a
                function.

        Raises:
            StorageError: there is no run, or not what it was made with.
            ConfigurationError: an argument is of the wrong type.
            SerializationError: something stored cannot be loaded here; give it anew.
        """
        if "trainer_init_config" in arguments:
            arguments["train_loop_config"] = arguments.pop("trainer_init_config")
        if trainer_init_per_worker is not None:
            datasets = arguments.pop("datasets", None) or {}
            arguments["train_loop_per_worker"] = _TrainFunction(trainer_init_per_worker, dict(datasets))
        return TorchTrainer.restore(path, storage_filesystem=storage_filesystem, **arguments)
