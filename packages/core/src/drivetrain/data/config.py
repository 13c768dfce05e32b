"""``DataConfig``: which datasets are split, and how Ray Data reads them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.data.position import Position
from drivetrain.data.sources import Source, is_ray_dataset, open_dataset
from drivetrain.errors import ConfigurationError, ResourceError

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
            position = Position.from_dict(states[name]) if name in states else None
            made = self._shards(name, dataset, world_size, worker_node_ids, split, position, taken)
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
        return {
            name: dataset if callable(dataset) or is_ray_dataset(dataset) else self._open(name, dataset)
            for name, dataset in datasets.items()
        }

    @staticmethod
    def default_ingest_options() -> Any:
        """The ``ray.data.ExecutionOptions`` that are used where none are given."""
        from ray.data import ExecutionOptions

        return ExecutionOptions()

    def _ingest_options(self, name: str, dataset: Any, taken: Mapping[str, float]) -> Any:
        """How Ray Data reads a dataset, which does not count on what the workers have."""
        import ray
        from ray.data import ExecutionResources
        from ray.data.dataset import MaterializedDataset

        options = copy.deepcopy(self.execution_options or self.default_ingest_options())
        excluded = getattr(options, "exclude_resources", None)  # which Ray is about to remove
        if options.resource_limits.cpu not in (None, float("inf")) or (excluded is not None and excluded.cpu):
            return options  # the user's own division of the cluster
        cluster: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        there = cluster.get("CPU", 0.0)
        if there - taken.get("CPU", 0.0) < 1 and not isinstance(dataset, MaterializedDataset):
            raise ResourceError(
                f"dataset {name!r} is read by Ray Data, which wants at least one CPU beside those of the run, found "
                f"{there:g} CPUs in the cluster, of which the run takes {taken.get('CPU', 0.0):g}: use fewer workers, "
                "or ScalingConfig(resources_per_worker={'CPU': ...}) with fewer CPUs each"
            )
        options.resource_limits = ExecutionResources(
            cpu=there - taken.get("CPU", 0.0),
            gpu=cluster.get("GPU", 0.0) - taken.get("GPU", 0.0),
            object_store_memory=options.resource_limits.object_store_memory,
        )
        return options

    def _check_names(self, datasets: Mapping[str, Any]) -> None:
        split = () if self.datasets_to_split == "all" else self.datasets_to_split
        for argument, names in (("datasets_to_split", split), ("keep_together", self.keep_together)):
            if unknown := sorted(set(names) - set(datasets)):
                raise ConfigurationError(
                    f"DataConfig({argument}=...) wants names of datasets ({', '.join(map(repr, datasets))}), "
                    f"found {', '.join(map(repr, unknown))}"
                )

    def _open(self, name: str, dataset: Any) -> Source:
        if isinstance(dataset, Source):
            return dataset
        source = open_dataset(name, dataset)
        return source.keeping_together(self.keep_together[name]) if name in self.keep_together else source

    def _shards(
        self,
        name: str,
        dataset: Any,
        world_size: int,
        nodes: Sequence[str] | None,
        split: bool,
        position: Position | None,
        taken: Mapping[str, float],
    ) -> Sequence[Any]:
        if callable(dataset):
            dataset = dataset()
        if not is_ray_dataset(dataset):
            return self._open(name, dataset).shards(world_size, split=split, position=position)
        if name in self.keep_together:
            raise ConfigurationError(
                f"dataset {name!r} is Ray's, which cannot keep rows together by {self.keep_together[name]!r}: "
                "use another kind of dataset"
            )
        dataset.context.execution_options = self._ingest_options(name, dataset, taken)
        if not split:
            return [dataset.iterator()] * world_size
        hints = list(nodes) if nodes else None
        shards: Sequence[Any] = dataset.streaming_split(world_size, equal=True, locality_hints=hints)
        return shards
