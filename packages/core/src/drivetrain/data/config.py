"""``DataConfig``: which datasets are split, and how Ray Data reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain._hooks.dataset import SplitRequest
from drivetrain._hooks.plugins import load_plugin
from drivetrain._hooks.providers import OpenedDataset, Providers
from drivetrain.data.position import Position
from drivetrain.data.sources import Source, open_dataset
from drivetrain.errors import ConfigurationError

__all__ = ["DataConfig"]


class DataConfig:
    """How a trainer's datasets are split among its workers.

    Args:
        datasets_to_split: names of the datasets of which every worker gets its own part, or ``"all"``; of the others
            every worker gets all rows.
        execution_options: how Ray Data reads its datasets: a ``ray.data.ExecutionOptions``.
        keep_together: by dataset, a column of which rows with equal values stay on one worker; such rows are next to
            each other. Parts are then only about even.

    Raises:
        ConfigurationError: an argument is of the wrong type.

    Example:
        >>> DataConfig(datasets_to_split=["train"]).datasets_to_split
        ['train']
    """

    def __init__(
        self,
        datasets_to_split: str | Sequence[str] = "all",
        execution_options: Any | None = None,
        *,
        keep_together: Mapping[str, str] | None = None,
    ) -> None:
        names = datasets_to_split
        if names != "all" and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise ConfigurationError(
                f'DataConfig(datasets_to_split=...) wants "all" or a list of names, found {datasets_to_split!r}'
            )
        self.datasets_to_split = names if isinstance(names, str) else list(names)
        self.execution_options = execution_options
        self.keep_together = dict(keep_together or {})

    def configure(
        self,
        datasets: Mapping[str, Any],
        world_size: int,
        worker_handles: Sequence[Any] | None = None,
        worker_node_ids: Sequence[str] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Makes what each worker's :func:`~drivetrain.get_dataset_shard` returns. Override it for a split of your own.

        Called in the driver at the start of each attempt, whose number of workers may differ from the last one's.

        Args:
            datasets: by name.
            world_size: the number of workers.
            worker_handles: None; here for code that was written for Ray Train.
            worker_node_ids: the node of each worker, by rank.
            options: ``positions``, if the checkpoint to continue from has any: by dataset, what its shards'
                ``state_dict()`` returned; and ``resources``, if there are datasets of Ray's: what the run takes of the
                cluster, by name.

        Returns:
            The shards of each rank, by name. They are pickled to the workers.

        Raises:
            ConfigurationError: a dataset is nothing that can be split, or there is none of a name to split.
            ResourceError: the workers leave no CPU to read a Ray dataset with.
        """
        self._check_names(datasets)
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        states, taken = options.get("positions") or {}, options.get("resources") or {}
        for name, dataset in datasets.items():
            split = self.datasets_to_split == "all" or name in self.datasets_to_split
            made = self._shards(name, dataset, world_size, worker_node_ids, split, states.get(name), taken)
            for rank, shard in enumerate(made):
                shards[rank][name] = shard
        return shards

    def open(self, datasets: Mapping[str, Any]) -> Mapping[str, Any]:
        """Opens what can be, once for all attempts, so that mistakes are found before workers are started.

        Returns:
            What :meth:`configure` is called with: the datasets themselves where that alone is overridden; otherwise,
            but for functions and Ray's, objects with a method ``schema()``.

        Raises:
            ConfigurationError: see :meth:`configure`.
        """
        if type(self).configure is not DataConfig.configure and type(self).open is DataConfig.open:
            return datasets
        self._check_names(datasets)
        return {name: dataset if callable(dataset) else self._open(name, dataset) for name, dataset in datasets.items()}

    @staticmethod
    def default_ingest_options() -> Any:
        """The ``ray.data.ExecutionOptions`` that are used where none are given."""
        return load_plugin("dataset", "ray")().default_options()

    def _check_names(self, datasets: Mapping[str, Any]) -> None:
        split = () if self.datasets_to_split == "all" else self.datasets_to_split
        for argument, names in (("datasets_to_split", split), ("keep_together", self.keep_together)):
            if unknown := sorted(set(names) - set(datasets)):
                raise ConfigurationError(
                    f"DataConfig({argument}=...) wants names of datasets ({', '.join(map(repr, datasets))}), "
                    f"found {', '.join(map(repr, unknown))}"
                )

    def _open(self, name: str, dataset: Any) -> Source | OpenedDataset:
        if isinstance(dataset, (Source, OpenedDataset)):
            return dataset
        providers = Providers()
        if providers.accepting(dataset):
            return providers.open(name, dataset, keep_together=self.keep_together.get(name))
        source = open_dataset(name, dataset)
        return source.keeping_together(self.keep_together[name]) if name in self.keep_together else source

    def _shards(
        self,
        name: str,
        dataset: Any,
        world_size: int,
        nodes: Sequence[str] | None,
        split: bool,
        position: Mapping[str, Any] | None,
        taken: Mapping[str, float],
    ) -> Sequence[Any]:
        opened = self._open(name, dataset() if callable(dataset) else dataset)
        if isinstance(opened, Source):
            resumed = None if position is None else Position.from_dict(position)
            return opened.shards(world_size, split=split, position=resumed)
        request = SplitRequest(
            name=name,
            world_size=world_size,
            whole=not split,
            node_ids=tuple(nodes or ()),
            position=position,
            resources=taken,
            options=self.execution_options,
        )
        return opened.split(request)
