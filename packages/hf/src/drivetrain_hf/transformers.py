"""Transformers' ``Trainer`` in a drivetrain run.

Importing this module does not import transformers: a worker does, once it needs it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain import (
    Checkpoint,
    ConfigurationError,
    DataConfig,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    get_dataset_shard,
)
from drivetrain_hf._arguments import check_arguments
from drivetrain_hf._frameworks import require
from drivetrain_torch import TorchConfig, TorchTrainer

if TYPE_CHECKING:
    from drivetrain_hf._callback import RayTrainReportCallback

__all__ = ["RayTrainReportCallback", "TransformersTrainer", "prepare_trainer"]

T = TypeVar("T")
_NAMES = {"train", "evaluation"}
_TABLES = {"pandas", "polars", "pyarrow", "ray"}


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
        raise ConfigurationError(f"prepare_trainer: expected a transformers.Trainer, got {trainer!r}")
    check_arguments(made.args)
    if get_context().get_world_rank() != 0:
        for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
            made.remove_callback(callback)
        transformers.utils.logging.disable_progress_bar()  # those of loading and saving
    if _is_shard(made.train_dataset):
        _read_shard(made)
    elif _is_batches(made.train_dataset):
        if made.args.max_steps <= 0:
            raise ConfigurationError(
                "prepare_trainer: expected TrainingArguments(max_steps=...) for data that can only be iterated "
                "over, got "
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


def _is_shard(data: object) -> bool:
    from drivetrain_hf._batches import ShardRows

    return isinstance(data, ShardRows)


def _read_shard(trainer: Any) -> None:
    """Has a ``Trainer`` train on the rows of this worker alone, which it would have all processes share otherwise."""
    from torch.utils.data import DataLoader

    from drivetrain_hf._batches import ShardBatches

    args, rows = trainer.args, trainer.train_dataset
    names = None
    if args.remove_unused_columns:
        names = {*inspect.signature(trainer.model.forward).parameters, *trainer.label_names, "label", "label_ids"}

    def get_train_dataloader() -> Any:
        batches = ShardBatches(
            rows.shard, args.train_batch_size, trainer.data_collator, drop_last=args.dataloader_drop_last, names=names
        )
        return DataLoader(batches, batch_size=None, collate_fn=_as_is)

    trainer.get_train_dataloader = get_train_dataloader
    if rows.total is not None:
        trainer.num_examples = lambda loader: rows.total


def _as_is(batch: T) -> T:
    return batch


def _pass_on(batches: Any) -> Any:
    from torch.utils.data import DataLoader

    from drivetrain_hf._batches import Batches

    return DataLoader(Batches(batches), batch_size=None)


@dataclass(frozen=True)
class _TrainFunction:
    """Makes a ``Trainer`` and trains it, from the latest checkpoint if there is one.

    Attributes:
        init: makes it.
        sampled: data that it draws batches from by itself.
        split: names of the data of which this worker has a shard.
    """

    init: Callable[..., Any]
    sampled: Mapping[str, Any] = field(default_factory=dict)
    split: Sequence[str] = ()

    def __call__(self, config: dict[str, Any]) -> None:
        require("transformers")
        from drivetrain_hf._batches import ShardRows
        from drivetrain_hf._callback import RayTrainReportCallback

        data = {**self.sampled, **{name: ShardRows(get_dataset_shard(name)) for name in self.split}}
        trainer = self.init(data.get("train"), data.get("evaluation"), **config)
        trainer = prepare_trainer(trainer)
        if not any(isinstance(used, RayTrainReportCallback) for used in trainer.callback_handler.callbacks):
            trainer.add_callback(RayTrainReportCallback())
        with contextlib.ExitStack() as stack:
            path = None
            if (checkpoint := get_checkpoint()) is not None:
                directory = stack.enter_context(checkpoint.as_directory())
                path = os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.train(resume_from_checkpoint=path)


def _divide(datasets: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Data that a ``Trainer`` draws batches from by itself, and data that is split among the workers first.

    Raises:
        ConfigurationError: a dataset has a name of no use.
    """
    given = dict(datasets or {})
    if unknown := sorted(given.keys() - _NAMES):
        raise ConfigurationError(
            "TransformersTrainer(datasets=...): expected 'train' and 'evaluation', got "
            f"{', '.join(map(repr, unknown))}: rename it, or load it in trainer_init_per_worker"
        )
    split = {name: dataset for name, dataset in given.items() if _is_split(dataset)}
    return {name: dataset for name, dataset in given.items() if name not in split}, split


def _data_config(split: Mapping[str, Any]) -> DataConfig:
    """A ``Trainer`` has rank 0 read what it evaluates on: only then are metrics those of each row, once."""
    return DataConfig(datasets_to_split=sorted(split.keys() - {"evaluation"}))


def _is_split(dataset: Any) -> bool:
    if isinstance(dataset, (list, tuple)):
        return bool(dataset) and all(isinstance(item, (str, os.PathLike)) for item in dataset)
    if isinstance(dataset, (str, os.PathLike, Mapping)) or inspect.isroutine(dataset):
        return True
    classes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__}
    return ("datasets", "IterableDataset") in classes or not _TABLES.isdisjoint(library for library, _ in classes)


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
        datasets: under ``"train"`` and ``"evaluation"`` what the function is given; None is passed for what is missing.
            A list of rows, a ``torch.utils.data.Dataset`` and a ``datasets.Dataset`` are passed as they are, for the
            ``Trainer`` to draw batches from. What :class:`~drivetrain_torch.TorchTrainer` takes besides, Ray datasets
            among it, is passed as rows to iterate over, in the dataset's order: of ``"train"`` each worker reads its
            own part, ``"evaluation"`` is read by rank 0, which hands each batch's parts to the others.
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
                "TransformersTrainer(trainer_init_per_worker=...): expected a function, got "
                f"{trainer_init_per_worker!r}"
            )
        sampled, split = _divide(datasets)
        super().__init__(
            _TrainFunction(trainer_init_per_worker, sampled, tuple(split)),
            train_loop_config=trainer_init_config,
            datasets=split,
            dataset_config=_data_config(split),
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

        This unpickles ``trainer.pkl``, which can execute code: restore only runs that you trust.

        Args:
            path: the run directory.
            trainer_init_per_worker: in place of the stored function and its datasets.
            storage_filesystem: the filesystem that ``path`` is on; None for the one it names.
            arguments: the trainer's other arguments, each in place of the stored one. Of ``datasets`` those that are
                split are not stored: give them again.

        Raises:
            StorageError: there is no run, or not what it was made with.
            ConfigurationError: an argument is of the wrong type.
            SerializationError: something stored cannot be loaded here; give it anew.
        """
        if "trainer_init_config" in arguments:
            arguments["train_loop_config"] = arguments.pop("trainer_init_config")
        sampled, split = _divide(arguments.pop("datasets", None))
        if trainer_init_per_worker is not None:
            arguments["train_loop_per_worker"] = _TrainFunction(trainer_init_per_worker, sampled, tuple(split))
        elif sampled:
            raise ConfigurationError(
                f"TransformersTrainer.restore(datasets=...): expected a trainer_init_per_worker along with "
                f"{', '.join(map(repr, sampled))}, which is stored with that function: give both, or neither"
            )
        if split:
            arguments |= {"datasets": split, "dataset_config": _data_config(split)}
        return TorchTrainer.restore(path, storage_filesystem=storage_filesystem, **arguments)
