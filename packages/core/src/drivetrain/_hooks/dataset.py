"""What a plugin provides that can read a kind of dataset."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from drivetrain._hooks.plugins import installed_plugins
from drivetrain.errors import PluginBrokenError, PluginError

__all__ = ["DatasetProvider", "SplitRequest", "find_provider"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRequest:
    """How a dataset is to be split at the start of an attempt.

    Attributes:
        name: the dataset's, in ``datasets=``.
        world_size: the number of workers.
        split: False if every worker gets all rows.
        node_ids: the node of each worker, by rank; None if they are not known.
        resources: what the run takes of the cluster, by name.
        options: ``DataConfig(execution_options=...)``.
        keep_together: a column whose rows with equal values stay on one worker; None without.
    """

    name: str
    world_size: int
    split: bool
    node_ids: Sequence[str] | None
    resources: Mapping[str, float]
    options: Any = None
    keep_together: str | None = None


class DatasetProvider(ABC):
    """Reads datasets of one kind; it is made without arguments.

    Attributes:
        runtime: the name of the runtime that these datasets require; None for any.
    """

    runtime: ClassVar[str | None] = None

    @abstractmethod
    def accepts(self, dataset: object) -> bool:
        """Whether a dataset is of this kind. Called for every dataset, so it must not import the library."""

    @abstractmethod
    def split(self, dataset: Any, request: SplitRequest) -> Sequence[Any]:
        """Makes what :func:`drivetrain.get_dataset_shard` returns on each rank; it is pickled to the workers.

        Raises:
            ConfigurationError: the dataset cannot be split as requested.
            ResourceError: the workers leave nothing to read the dataset with.
        """


def find_provider(dataset: object) -> DatasetProvider | None:
    """The provider of a plugin that accepts a dataset; None if there is none.

    Raises:
        PluginError: several do.
    """
    if type(dataset).__module__ == "builtins":  # a path, a list or a dict
        return None
    accepting = []
    for plugin in installed_plugins("dataset"):
        try:
            provider: DatasetProvider = plugin.load()()
            if provider.accepts(dataset):
                accepting.append((plugin, provider))
        except PluginBrokenError as error:  # which is no reason not to read other datasets
            warnings.warn(str(error), stacklevel=2)
    if len(accepting) > 1:
        names = " and ".join(f"{plugin.name!r} of {plugin.distribution}" for plugin, _ in accepting)
        raise PluginError(f"a dataset of type {type(dataset).__name__} is accepted by {names}: uninstall one of them")
    return accepting[0][1] if accepting else None
