"""The interface of dataset plugins: a provider opens datasets of one kind and splits them into one shard per rank."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from drivetrain.errors import ConfigurationError

__all__ = ["DatasetProvider", "DatasetShard", "Shard", "SplitRequest", "WorkerShard", "is_instance_of"]


class Shard(Protocol):
    """The rows of a dataset that one worker reads. A provider's shards are pickled and sent to the workers."""

    def iter_batches(self, *, batch_size: int | None = 256) -> Iterable[Any]:
        """Iterate over the rows in batches.

        Args:
            batch_size: rows per batch; None for one batch with all rows.
        """
        ...


@runtime_checkable
class DatasetShard(Shard, Protocol):
    """A shard whose position in an epoch can be saved and resumed.

    :func:`~drivetrain.get_dataset_shard` returns one for every dataset that ``drivetrain[data]`` reads: a
    :class:`drivetrain_data.TableShard`, which has further methods.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch, as JSON-serializable values. All ranks return the same position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration over batches continue from a position.

        Args:
            state: the return value of :meth:`state_dict`, on any rank.

        Raises:
            ConfigurationError: the position belongs to another dataset, or this number of workers cannot continue from
                it.
        """
        ...

    def take_state(self) -> dict[str, Any] | None:
        """Return the last return value of :meth:`state_dict`; None if it was not called since this method's last call.

        ``report`` calls this method and stores the position in the checkpoint's metadata. The next attempt passes that
        position to :meth:`DatasetProvider.split() <drivetrain.plugin.DatasetProvider.split>`.
        """
        ...


class WorkerShard(DatasetShard, Protocol):
    """The type of the return value of :func:`~drivetrain.get_dataset_shard`, for type checkers.

    It has the methods of :class:`drivetrain_data.TableShard`, which describes them. A shard of another provider may
    lack some of these methods and have others: ``ray.data.DataIterator`` has no ``state_dict``, but ``materialize``. To
    use the class of such a provider, narrow the type::

        shard = drivetrain.get_dataset_shard("train")
        assert isinstance(shard, ray.data.DataIterator)
    """

    def iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
        batch_format: Literal["default", "numpy", "pandas", "pyarrow"] | None = "default",
    ) -> Iterable[Any]:
        """Iterate over the rows in batches of arrays, or as data frames or tables."""
        ...

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = 256,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
    ) -> Iterable[Any]:
        """Iterate over the rows in batches of PyTorch tensors."""
        ...

    def iter_tf_batches(
        self,
        *,
        batch_size: int | None = 256,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
    ) -> Iterable[Any]:
        """Iterate over the rows in batches of TensorFlow tensors."""
        ...

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        batch_size: int = 256,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
    ) -> Any:
        """Return the rows as a ``tf.data.Dataset`` of (features, labels) pairs."""
        ...

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """Iterate over the rows as dicts of Python values."""
        ...

    def iter_tables(self) -> Iterable[Any]:
        """Iterate over the rows as pyarrow tables, as they are read."""
        ...

    def to_table(self) -> Any:
        """Return all rows as a pyarrow table."""
        ...

    def to_pandas(self) -> Any:
        """Return all rows as a pandas data frame."""
        ...

    def schema(self) -> Any:
        """Return the columns with their types."""
        ...

    def count(self) -> int:
        """Return the number of rows in this shard."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRequest:
    """A request to split a dataset for one attempt.

    Attributes:
        name: the name of the dataset.
        world_size: the number of shards: one for each worker, or for each group of workers that read the same rows.
        whole: True if every shard has all rows instead of a part of them.
        node_ids: the ids of the nodes that read the shards, in the order of the shards; empty if unknown.
        position: the position in this dataset that the checkpoint to resume from contains; None to start an epoch. The
            train function decides whether to resume from that position: it calls
            :meth:`DatasetShard.load_state_dict() <drivetrain.plugin.datasets.DatasetShard.load_state_dict>`.
        resources: the cluster resources that the run uses, by name, so that a provider can use the remaining resources
            for reading; empty if unknown.
        options: the ``execution_options`` of :class:`drivetrain.DataConfig`.
        shuffle_seed: the seed of the order of the rows; None to keep their order.
        shuffle_rows: the number of rows that are shuffled in memory.
        is_shared: True if several workers read each shard, so that its batches must be the same on all of them.
    """

    name: str
    world_size: int
    whole: bool = False
    node_ids: Sequence[str] = ()
    position: Mapping[str, Any] | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    options: Any | None = None
    shuffle_seed: int | None = None
    shuffle_rows: int = 2**18
    is_shared: bool = False


class DatasetProvider(ABC):
    """Splits datasets of one kind among the workers. Entry points in ``drivetrain.datasets`` refer to subclasses.

    For each dataset, :meth:`accepts` is called on every installed provider, and exactly one provider may return True.
    Therefore, neither the import of the class nor a call of :meth:`accepts` may import other libraries; see
    :func:`is_instance_of`.

    Attributes:
        accepted: a description of the accepted objects for error messages, such as ``"a Ray dataset"``.
        runtimes: the names of the runtimes whose workers can read the shards. If the user selects no runtime, the first
            one is used. None if the workers of every runtime can read the shards.
        shuffles: True if :meth:`split` shuffles the rows when the request has a ``shuffle_seed``. Otherwise, such a
            request is refused.
        shares: True if several workers can read a copy of one shard, as :class:`drivetrain.DataConfig` requests with
            ``mesh``. Otherwise, such a request is refused.
    """

    accepted: ClassVar[str] = "objects of its own kind"
    runtimes: ClassVar[Sequence[str] | None] = None
    shuffles: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, dataset: object) -> bool:
        """Return True if this provider can split an object that was passed in ``datasets=``."""

    def open(self, name: str, dataset: Any, *, keep_together: str | None = None) -> Any:
        """Open a dataset once for all attempts, before anything is started or written, and check it.

        Args:
            name: the name of the dataset.
            dataset: an object for which :meth:`accepts` returned True.
            keep_together: the name of a column: all rows with the same value in that column must go to one worker. None
                for no such column.

        Returns:
            The opened dataset. It is passed to :meth:`split` as ``opened``, in the same process.

        Raises:
            ConfigurationError: the dataset cannot be opened, or cannot keep rows together.
        """
        if keep_together is not None:
            raise ConfigurationError(
                f"[DT-102] dataset {name!r}: DataConfig(keep_together={{{name!r}: {keep_together!r}}}) is not "
                f"supported for {self.accepted}. Use another kind of dataset, or remove keep_together"
            )
        return dataset

    @abstractmethod
    def split(self, opened: Any, request: SplitRequest) -> Sequence[Shard]:
        """Split a dataset at the start of an attempt.

        Args:
            opened: the return value of :meth:`open`.
            request: the number of workers, and how to split the dataset among them.

        Returns:
            ``request.world_size`` shards: one per rank, in the order of the ranks, unless ranks share shards. They are
            pickled and sent to the workers.

        Raises:
            ConfigurationError: the dataset cannot be split as requested.
            ResourceError: the workers leave too few resources for reading the dataset.
        """

    def adopt(self, shard: Any) -> Any:
        """Prepare a shard that a subclass of :class:`~drivetrain.DataConfig` has created without this provider.

        The driver calls the method of every provider for each of these shards, also for shards that the provider has
        created. Return a shard of another kind unchanged.
        """
        return shard

    def default_options(self) -> Any | None:
        """Return the default ``execution_options``; None if the provider has no options."""
        return None


def is_instance_of(value: object, module: str, name: str) -> bool:
    """Return True if a value is an instance of a class, without importing the module that exports the class.

    Args:
        value: any object.
        module: the module from which users import the class. If it has not been imported, the result is False.
        name: the name of the class in that module.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
