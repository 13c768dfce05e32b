"""The hook ``drivetrain.datasets``: a provider opens datasets of its kind and splits them into one shard per rank."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from drivetrain.errors import ConfigurationError

__all__ = ["DatasetProvider", "DatasetShard", "Shard", "SplitRequest", "is_instance_of"]


class Shard(Protocol):
    """A worker's part of a dataset. A provider's shards are pickled to the workers."""

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
        """Return the position in the current epoch, as values that JSON can represent. It is the same on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration over batches continue from a position.

        Args:
            state: the return value of :meth:`state_dict`, on any rank.

        Raises:
            ConfigurationError: the position belongs to another dataset, or cannot be continued with this number of
                workers.
        """
        ...

    def take_state(self) -> dict[str, Any] | None:
        """Return the last value that :meth:`state_dict` returned since the previous call of this method, or None.

        ``report`` calls this method and stores the position in the checkpoint's metadata. The next attempt passes it
        to :meth:`DatasetProvider.split() <drivetrain.plugin.DatasetProvider.split>`.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRequest:
    """A request to split a dataset for one attempt.

    Attributes:
        name: the name of the dataset.
        world_size: the number of workers.
        whole: True if every worker gets all rows instead of its own part.
        node_ids: the node of each worker, by rank; empty if unknown.
        position: the position that the checkpoint to resume from has for this dataset; None to start an epoch. The
            train function decides whether it resumes there: it calls :meth:`DatasetShard.load_state_dict()
            <drivetrain.DatasetShard.load_state_dict>`.
        resources: the cluster resources that the run uses, by name, so that a provider can read with the
            remaining ones; empty if unknown.
        options: the ``execution_options`` of :class:`drivetrain.DataConfig`.
    """

    name: str
    world_size: int
    whole: bool = False
    node_ids: Sequence[str] = ()
    position: Mapping[str, Any] | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    options: Any | None = None


class DatasetProvider(ABC):
    """Splits datasets of one kind among the workers. An entry point in ``drivetrain.datasets`` refers to the class.

    For each dataset, :meth:`accepts` is called on every installed provider, and exactly one may return True. Therefore
    importing the class and calling :meth:`accepts` must not import other libraries: see :func:`is_instance_of`.

    Attributes:
        accepted: what the provider accepts, for error messages, such as ``"a Ray dataset"``.
        runtimes: the names of the runtimes whose workers can read the shards. The first one is used if the user
            selects none. None if the workers of every runtime can read them.
    """

    accepted: ClassVar[str] = "objects of its own kind"
    runtimes: ClassVar[Sequence[str] | None] = None

    @abstractmethod
    def accepts(self, dataset: object) -> bool:
        """Return True if this provider can split an object that was passed in ``datasets=``."""

    def open(self, name: str, dataset: Any, *, keep_together: str | None = None) -> Any:
        """Open a dataset once for all attempts, before anything is started or written, and check it.

        Args:
            name: the name of the dataset.
            dataset: the object that was accepted.
            keep_together: a column whose equal values stay on one worker; None for no such column.

        Returns:
            The argument of :meth:`split`, in the same process.

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
            One shard per rank, by rank. They are pickled to the workers.

        Raises:
            ConfigurationError: the dataset cannot be split like this.
            ResourceError: the workers leave too few resources for reading the dataset.
        """

    def default_options(self) -> Any | None:
        """Return the default ``execution_options``; None if the provider has no options."""
        return None


def is_instance_of(value: object, module: str, name: str) -> bool:
    """Return True if a value is an instance of a class, without importing the module that exports the class.

    Args:
        value: any object.
        module: the module from which users import the class. If it is not imported, there are no instances.
        name: the name of the class in that module.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
