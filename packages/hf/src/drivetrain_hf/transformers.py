"""The ``Trainer`` of Transformers in a drivetrain run.

Importing this module does not import transformers. Each worker imports transformers on first use.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    from typing_extensions import Self

    from drivetrain_hf._callback import RayTrainReportCallback

__all__ = ["RayTrainReportCallback", "TransformersTrainer", "prepare_trainer"]

T = TypeVar("T")
_NAMES = {"train", "evaluation"}
_TABLES = {"pandas", "polars", "pyarrow", "ray"}


def __getattr__(name: str) -> Any:
    if name == "RayTrainReportCallback":  # imported lazily because it derives from a class of transformers
        require("transformers")
        from drivetrain_hf._callback import RayTrainReportCallback

        return RayTrainReportCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def prepare_trainer(trainer: T) -> T:
    """Check that a ``transformers.Trainer`` is configured for this run, and prepare it for several workers.

    Afterwards, only rank 0 shows progress bars and prints logs. The training data and the evaluation data can each be a
    plain iterable: an object without random access that is not a ``torch.utils.data.Dataset``. The items of a plain
    iterable are this worker's own batches. The ``Trainer`` passes these batches to the model unchanged, without
    batching or sharding. Training data in a plain iterable requires ``TrainingArguments(max_steps=...)``.

    Args:
        trainer: a trainer created in the train function, on every worker. Prepare it before you call its ``train()``.

    Returns:
        The same trainer.

    Raises:
        ConfigurationError: the argument is not a ``Trainer``; it would train on each worker alone; it would ignore
            requested DeepSpeed or FSDP settings; ``max_steps`` is missing although the training data is a plain
            iterable; or the run ranks checkpoints by an evaluation metric, but not every step that saves a checkpoint
            evaluates.
        PluginError: transformers is not installed.
        SessionError: called outside a train function.
    """
    require("transformers")
    import transformers

    hf_trainer: Any = trainer
    if not isinstance(hf_trainer, transformers.Trainer):
        raise ConfigurationError(f"prepare_trainer: expected a transformers.Trainer, got {trainer!r}")
    check_arguments(hf_trainer.args)
    if get_context().get_world_rank() != 0:
        for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
            hf_trainer.remove_callback(callback)
        transformers.utils.logging.disable_progress_bar()  # for loading and saving
    if _is_shard(hf_trainer.train_dataset):
        _read_shard(hf_trainer)
    elif _is_batches(hf_trainer.train_dataset):
        if hf_trainer.args.max_steps <= 0:
            raise ConfigurationError(
                "prepare_trainer: expected TrainingArguments(max_steps=...) of at least 1 for iterable data, got "
                f"max_steps={hf_trainer.args.max_steps}. Set it to the number of optimizer steps to train for"
            )
        hf_trainer.get_train_dataloader = lambda: _as_dataloader(hf_trainer.train_dataset)
    else:
        _make_resumable(hf_trainer)
    get_dataset_dataloader = hf_trainer.get_eval_dataloader

    def get_eval_dataloader(eval_dataset: Any = None) -> Any:
        data = hf_trainer.eval_dataset if eval_dataset is None else eval_dataset
        data = hf_trainer.eval_dataset[data] if isinstance(data, str) else data
        return _as_dataloader(data) if _is_batches(data) else get_dataset_dataloader(eval_dataset)

    hf_trainer.get_eval_dataloader = get_eval_dataloader
    return trainer


def prepare(value: Any) -> Any:
    """Prepare a ``Trainer`` for :func:`drivetrain.prepare`. A model is prepared like every other PyTorch model."""
    module: Any = sys.modules.get("transformers.trainer")
    return prepare_trainer(value) if module is not None and isinstance(value, module.Trainer) else NotImplemented


def _is_batches(data: object) -> bool:
    import torch

    is_dataset = hasattr(data, "__getitem__") or isinstance(data, torch.utils.data.Dataset)
    return hasattr(data, "__iter__") and not is_dataset


def _is_shard(data: object) -> bool:
    from drivetrain_hf._batches import ShardRows

    return isinstance(data, ShardRows)


def _read_shard(trainer: Any) -> None:
    """Make a ``Trainer`` train on all rows of this worker's shard. By default, it would split the shard again."""
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


def _make_resumable(trainer: Any) -> None:
    """Make a ``Trainer`` continue in the middle of an epoch with the same batches and random numbers."""
    from drivetrain_hf._loading import ResumableLoader, TrainerLoader, is_resumable

    get_train_dataloader = trainer.get_train_dataloader

    def get_resumable() -> Any:
        loader = get_train_dataloader()
        return TrainerLoader(ResumableLoader(loader)) if is_resumable(loader) else loader

    trainer.get_train_dataloader = get_resumable


def _as_is(batch: T) -> T:
    return batch


def _as_dataloader(batches: Any) -> Any:
    from torch.utils.data import DataLoader

    from drivetrain_hf._batches import Batches

    return DataLoader(Batches(batches), batch_size=None)


@dataclass(frozen=True)
class _TrainFunction:
    """A train function that creates a ``Trainer`` and trains it, from the latest checkpoint if there is one.

    Attributes:
        init: creates the trainer.
        sampled: the datasets, by name, that the trainer receives unchanged and samples batches from.
        split: the names of the datasets that the trainer receives as this worker's shards.
    """

    init: Callable[..., Any]
    sampled: Mapping[str, Any] = field(default_factory=dict)
    split: Sequence[str] = ()

    def with_datasets(self, sampled: Mapping[str, Any], split: Collection[str]) -> _TrainFunction:
        """Return a copy in which the given datasets replace the datasets of the same names."""
        kept = {name: dataset for name, dataset in self.sampled.items() if name not in split}
        names = dict.fromkeys((*(name for name in self.split if name not in sampled), *split))
        return replace(self, sampled={**kept, **sampled}, split=tuple(names))

    def __call__(self, config: Mapping[str, Any]) -> None:
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
    """Separate the datasets that a ``Trainer`` receives unchanged from the datasets that it receives as shards.

    Args:
        datasets: the datasets by name, or None for no datasets.

    Returns:
        Two mappings from names to datasets: the unchanged datasets, and the datasets to read in shards.

    Raises:
        ConfigurationError: the name of a dataset is unknown.
    """
    given = dict(datasets or {})
    if unknown := sorted(given.keys() - _NAMES):
        raise ConfigurationError(
            "TransformersTrainer(datasets=...): expected the names 'train' and 'evaluation', got "
            f"{', '.join(map(repr, unknown))}. Use these names, or load the data in trainer_init_per_worker"
        )
    split = {name: dataset for name, dataset in given.items() if _is_split(dataset)}
    return {name: dataset for name, dataset in given.items() if name not in split}, split


def _data_config(split: Mapping[str, Any]) -> DataConfig:
    """Return a configuration that splits all datasets except the evaluation data.

    A ``Trainer`` reads all of the evaluation data on rank 0, so that the metrics count each row exactly once.
    """
    return DataConfig(datasets_to_split=sorted(split.keys() - {"evaluation"}))


def _is_split(dataset: Any) -> bool:
    if isinstance(dataset, (list, tuple)):
        return bool(dataset) and all(isinstance(item, (str, os.PathLike)) for item in dataset)
    if isinstance(dataset, (str, os.PathLike, Mapping)) or inspect.isroutine(dataset):
        return True
    classes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__}
    return ("datasets", "IterableDataset") in classes or not _TABLES.isdisjoint(library for library, _ in classes)


class TransformersTrainer(TorchTrainer):
    """Create a ``transformers.Trainer`` on every worker by calling your function, and train it.

    This is the older interface. With a :class:`~drivetrain_torch.TorchTrainer`, you write the train function yourself,
    and call :func:`prepare_trainer` and ``train()`` in it. A ``TransformersTrainer`` makes both calls for you, adds a
    :class:`RayTrainReportCallback`, and resumes from the latest checkpoint.

    Args:
        trainer_init_per_worker: a function that takes the training data and the evaluation data as its first two
            positional arguments, and the values of ``trainer_init_config`` as keyword arguments, and returns a
            ``transformers.Trainer``. It is called on every worker.
        trainer_init_config: the keyword arguments to pass to this function.
        torch_config: settings of the process group.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, how the run is monitored, and when it stops.
        datasets: the data to pass to the function, under the names ``"train"`` and ``"evaluation"``. If a name is
            missing, the function receives None in its place. A list of rows, a ``torch.utils.data.Dataset`` and a
            ``datasets.Dataset`` are passed unchanged, and the ``Trainer`` samples batches from them. Other types that
            :class:`~drivetrain_torch.TorchTrainer` accepts, including Ray datasets, are passed as iterables of rows, in
            the order of the dataset. Of these, each worker reads its own part of ``"train"``. Rank 0 reads all of
            ``"evaluation"``, and sends each of the other ranks its part of every batch.
        metadata: values returned by ``get_context().get_metadata()`` and by every checkpoint's ``get_metadata()``.
        resume_from_checkpoint: a checkpoint of a :class:`RayTrainReportCallback` to start a new run from.

    Raises:
        ConfigurationError: an argument has the wrong type, or the name of a dataset is neither ``"train"`` nor
            ``"evaluation"``.
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
        if isinstance(trainer_init_per_worker, _TrainFunction):  # from a restored run
            function = trainer_init_per_worker.with_datasets(sampled, split)
        else:
            function = _TrainFunction(trainer_init_per_worker, sampled, tuple(split))
        self._keep(trainer_init_per_worker=function)  # its datasets are stored for restore()
        super().__init__(
            function,
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
    ) -> Self:
        """Return a trainer that continues a run; see :meth:`drivetrain.DataParallelTrainer.restore`.

        This unpickles ``trainer.pkl``, which can execute code. Restore only runs that you trust.

        Args:
            path: the run directory.
            trainer_init_per_worker: replaces the stored function. Datasets that are not split are stored with the
                function, so pass them again in ``datasets`` together with a new function.
            storage_filesystem: the filesystem of ``path``, or None to infer it from ``path``.
            arguments: other arguments of the constructor, which replace the stored ones. Always pass datasets that are
                split among the workers, because they are not stored. Other datasets replace the stored ones.

        Raises:
            StorageError: there is no run at ``path``, or the run has no stored arguments.
            ConfigurationError: an argument has the wrong type.
            SerializationError: a stored argument cannot be loaded here. Pass it again.
        """
        return super().restore(path, trainer_init_per_worker, storage_filesystem=storage_filesystem, **arguments)
