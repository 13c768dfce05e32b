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
        """The rows in batches.

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
        """The position in the current epoch, as plain values that JSON can hold. It is the same on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration over batches continue from a position.

        Args:
            state: the return value of :meth:`state_dict`, on any rank.

        Raises:
            ConfigurationError: the position belongs to another dataset, or cannot be continued with this number of
                workers.
        """
        ...

    def take_state(self) -> dict[str, Any] | None:
        """The last return value of :meth:`state_dict` since the previous call of this method; None without one.

        ``report`` calls this method and stores the position in the checkpoint's metadata. The next attempt passes it
        to :meth:`DatasetProvider.split() <drivetrain.plugin.DatasetProvider.split>`.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRequest:
    """How a dataset is split for one attempt.

    Attributes:
        name: the name of the dataset.
        world_size: the number of workers.
        whole: every worker gets all rows instead of its own part.
        node_ids: the node of each worker, by rank; empty if unknown.
        position: the position that the checkpoint to resume from has for this dataset; None to start an epoch. The
            train function decides whether it resumes there: it calls :meth:`DatasetShard.load_state_dict()
            <drivetrain.DatasetShard.load_state_dict>`.
        resources: the resources that the run takes from the cluster, by name, for providers that read with the rest;
            empty if unknown.
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
    """Splits datasets of one kind among the workers. An entry point in ``drivetrain.datasets`` names the class.

    Providers are asked one after the other whether they accept a dataset, and exactly one may. So importing the class
    and calling :meth:`accepts` must not import a library: see :func:`is_instance_of`.

    Attributes:
        accepted: what the provider accepts, for error messages, such as ``"a Ray dataset"``.
        runtimes: the names of the runtimes whose workers can read the shards. The first one is used if the user
            selects none. None if the workers of every runtime can read them.
    """

    accepted: ClassVar[str] = "objects of its own kind"
    runtimes: ClassVar[Sequence[str] | None] = None

    @abstractmethod
    def accepts(self, dataset: object) -> bool:
        """Whether this provider can split an object that was passed in ``datasets=``."""

    def open(self, name: str, dataset: Any, *, keep_together: str | None = None) -> Any:
        """Opens a dataset once for all attempts, before anything is started or written, and checks it.

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
                f"dataset {name!r}: DataConfig(keep_together={{{name!r}: {keep_together!r}}}) is not supported for "
                f"{self.accepted}. Use another kind of dataset, or remove keep_together"
            )
        return dataset

    @abstractmethod
    def split(self, opened: Any, request: SplitRequest) -> Sequence[Shard]:
        """Splits a dataset at the start of an attempt.

        Args:
            opened: the return value of :meth:`open`.
            request: among how many workers, and how.

        Returns:
            One shard per rank, by rank. They are pickled to the workers.

        Raises:
            ConfigurationError: the dataset cannot be split like this.
            ResourceError: the workers leave too few resources to read the dataset with.
        """

    def default_options(self) -> Any | None:
        """The ``execution_options`` that are used if the user gives none; None if the provider has no options."""
        return None


def is_instance_of(value: object, module: str, name: str) -> bool:
    """Whether a value is an instance of a class, without importing the module that exports the class.

    Args:
        value: any object.
        module: the module from which users import the class. If nothing has imported it, there are no instances.
        name: the name of the class in that module.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
