"""``DataConfig``: how datasets are split among the workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain._base.mesh import DataPosition, coordinates_of, data_position, mesh_kinds
from drivetrain._hooks.dataset import SplitRequest
from drivetrain._plugins.datasets import OpenedDataset, Providers
from drivetrain.errors import ConfigurationError, PluginNotFoundError

__all__ = ["DataConfig"]


class DataConfig:
    """Settings for splitting a trainer's datasets among its workers.

    Args:
        datasets_to_split: the names of the datasets that are split, so that each worker gets its own part; ``"all"``
            splits all of them. For the other datasets, every worker gets all rows.
        execution_options: a ``ray.data.ExecutionOptions`` for datasets of Ray Data, or a mapping from the names of such
            datasets to their options; None for the defaults.
        keep_together: a mapping from the name of a dataset to one of its columns: all rows with the same value in that
            column go to one worker. Such rows must be adjacent in the dataset. The workers' parts are then only
            approximately equal in size.
        shuffle: a mapping from the name of a dataset to a seed: its rows are read in a random order, another one in
            each epoch. The order depends on the seed, on the epoch and on ``shuffle_rows``, and not on the number of
            workers, which read consecutive parts of it. Rows of all files are mixed. Keep the three values when a run
            resumes within an epoch.
        shuffle_rows: the number of rows that are shuffled at once, and that each worker holds in memory. Blocks of an
            eighth of this number are drawn from the whole dataset, so that the rows of about eight random places are
            mixed.
        mesh: the dimensions of the workers' device mesh in their order, by name, with their sizes, if the train
            function combines data parallelism with another kind: ``{"dp": 2, "tp": 4}`` for
            ``init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))``. Workers at the same position of the data,
            replicate and shard dimensions then read the same rows. One size may be -1: the number of workers divided by
            the other sizes. None if every worker reads rows of its own.

    Raises:
        ConfigurationError: an argument is of the wrong type, or rows of a dataset are both kept together and shuffled.

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
        shuffle: Mapping[str, int] | None = None,
        shuffle_rows: int = 2**18,
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        names = datasets_to_split
        if names != "all" and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise ConfigurationError(
                '[DT-101] DataConfig(datasets_to_split=...): expected "all" or a list of names, got '
                f"{datasets_to_split!r}"
            )
        self.datasets_to_split = names if isinstance(names, str) else list(names)
        self.execution_options = execution_options
        self.keep_together = dict(keep_together or {})
        self.shuffle = dict(shuffle or {})
        self.shuffle_rows = shuffle_rows
        self.mesh = None if mesh is None else _checked_mesh(mesh)
        if not all(type(seed) is int and seed >= 0 for seed in self.shuffle.values()):
            raise ConfigurationError(
                "[DT-101] DataConfig(shuffle=...): expected a mapping from the names of datasets to integers >= 0, got "
                f"{shuffle!r}"
            )
        if type(shuffle_rows) is not int or shuffle_rows < 1:
            raise ConfigurationError(
                f"[DT-101] DataConfig(shuffle_rows=...): expected an integer >= 1, got {shuffle_rows!r}"
            )
        if both := sorted(set(self.shuffle) & set(self.keep_together)):
            raise ConfigurationError(
                f"[DT-102] DataConfig(shuffle=...): expected datasets that are not in keep_together, got "
                f"{both[0]!r}. Remove it from one of them"
            )

    def configure(
        self,
        datasets: Mapping[str, Any],
        world_size: int,
        worker_handles: Sequence[Any] | None = None,
        worker_node_ids: Sequence[str] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Create the shards that :func:`~drivetrain.get_dataset_shard` returns on each worker.

        Override this method to split datasets differently. It is called in the driver at the start of each attempt. The
        number of workers may differ between attempts.

        Args:
            datasets: the return value of :meth:`open`, which maps names to datasets.
            world_size: the number of workers.
            worker_handles: always None. The argument exists for code that was written for Ray Train.
            worker_node_ids: the ids of the workers' nodes, in the order of the ranks.
            options: up to two further keyword arguments. ``positions`` is a mapping from the name of a dataset to the
                return value of its shards' ``state_dict()``, and is passed if the checkpoint to resume from contains
                positions. ``resources`` is a mapping from the names to the amounts of the cluster resources that the
                run uses, and is passed if a dataset is a function or requires a runtime.

        Returns:
            One mapping per rank, from the name of a dataset to the rank's shard. The shards are pickled and sent to
            the workers.

        Raises:
            ConfigurationError: a dataset cannot be split, or this configuration names a dataset that does not exist.
            ResourceError: the workers leave too few resources for reading a dataset.
        """
        self._check_names(datasets)
        parts = [self.data_position(rank, world_size).part for rank in range(world_size)]
        first_ranks = {part: rank for rank, part in reversed([*enumerate(parts)])}
        nodes = worker_node_ids or ()
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        positions = options.get("positions") or {}
        made = {name: dataset() if callable(dataset) else dataset for name, dataset in datasets.items()}
        for name, dataset in self._open(made).items():
            request = SplitRequest(
                name=name,
                world_size=len(first_ranks),
                whole=self._is_whole(name),
                node_ids=tuple(nodes[first_ranks[part]] for part in range(len(first_ranks))) if nodes else (),
                position=positions.get(name),
                resources=options.get("resources") or {},
                options=self._execution_options_of(name),
                shuffle_seed=self.shuffle.get(name),
                shuffle_rows=self.shuffle_rows,
                is_shared=len(first_ranks) < world_size,
            )
            split = dataset.split(request)
            for of_rank, part in zip(shards, parts, strict=True):
                of_rank[name] = split[part]
        return shards

    def data_position(self, rank: int, world_size: int) -> DataPosition:
        """Return which shard of a split dataset a rank reads, and the number of shards.

        Args:
            rank: the rank.
            world_size: the number of workers.

        Raises:
            ConfigurationError: ``mesh`` describes another number of workers.
        """
        if self.mesh is None:
            return DataPosition(rank, world_size)
        others = math.prod(size for size in self.mesh.values() if size != -1)
        sizes = [world_size // others if size == -1 else size for size in self.mesh.values()]
        if math.prod(sizes) != world_size:
            raise ConfigurationError(
                f"[DT-117] DataConfig(mesh=...): expected the sizes of a mesh of all {world_size} workers, got "
                f"{self.mesh}. Change a size or num_workers, or set the data-parallel size to -1"
            )
        return data_position(mesh_kinds(list(self.mesh), ""), sizes, coordinates_of(rank, sizes))

    def open(self, datasets: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open datasets once for all attempts, so that errors are raised before workers are started.

        Returns:
            The ``datasets`` argument of :meth:`configure`: a mapping from each name to a
            :class:`drivetrain.plugin.datasets.OpenedDataset`, or to the function that creates the dataset. If a
            subclass overrides :meth:`configure` but not this method, nothing is opened, and ``datasets`` is returned.

        Raises:
            ConfigurationError: see :meth:`configure`.
            PluginError: no installed provider accepts a dataset, or several do.
        """
        if type(self).configure is not DataConfig.configure and type(self).open is DataConfig.open:
            return datasets
        self._check_names(datasets)
        given = {name: dataset for name, dataset in datasets.items() if not callable(dataset)}
        return {**datasets, **self._open(given)}

    @staticmethod
    def default_ingest_options() -> Any:
        """Return the default ``execution_options``: a ``ray.data.ExecutionOptions``.

        Raises:
            PluginNotFoundError: no installed provider has such options. ``drivetrain[ray]`` contains one that does.
        """
        options = Providers().default_options()
        if options is None:
            raise PluginNotFoundError(
                "[DT-601] no installed dataset provider has execution options. "
                'For those of Ray Data, run: pip install "drivetrain[ray]"'
            )
        return options

    def _open(self, datasets: Mapping[str, Any]) -> dict[str, OpenedDataset]:
        """Open the datasets that are not open yet."""
        opened = {name: dataset for name, dataset in datasets.items() if isinstance(dataset, OpenedDataset)}
        if len(opened) == len(datasets):
            return opened
        providers = Providers()
        found = {
            name: opened.get(name) or providers.open(name, dataset, keep_together=self.keep_together.get(name))
            for name, dataset in datasets.items()
        }
        for name in self.shuffle:
            if name in found and not found[name].provider.shuffles:
                raise ConfigurationError(
                    f"[DT-740] dataset {name!r}: expected a dataset that DataConfig(shuffle=...) can shuffle, got "
                    f"one of {found[name].origin}. Shuffle it with its own methods"
                )
        for name, dataset in found.items():
            if self.mesh is not None and not (dataset.provider.shares or self._is_whole(name)):
                raise ConfigurationError(
                    f"[DT-117] dataset {name!r}: expected a dataset that DataConfig(mesh=...) can split, so that "
                    f"several workers read the same rows, got one of {dataset.origin}. Use files, tables, data frames "
                    "or Hugging Face datasets, or leave it out of datasets_to_split"
                )
        return found

    def _is_whole(self, name: str) -> bool:
        """Return True if every worker gets all rows of a dataset."""
        return self.datasets_to_split != "all" and name not in self.datasets_to_split

    def _execution_options_of(self, name: str) -> Any:
        options = self.execution_options
        return options.get(name) if isinstance(options, Mapping) else options

    def _check_names(self, datasets: Mapping[str, Any]) -> None:
        split = () if self.datasets_to_split == "all" else self.datasets_to_split
        options = self.execution_options if isinstance(self.execution_options, Mapping) else {}
        for argument, names in (
            ("datasets_to_split", split),
            ("execution_options", options),
            ("keep_together", self.keep_together),
            ("shuffle", self.shuffle),
        ):
            if unknown := sorted(set(names) - set(datasets)):
                raise ConfigurationError(
                    f"[DT-109] DataConfig({argument}=...): expected names of datasets "
                    f"({', '.join(map(repr, datasets))}), got {', '.join(map(repr, unknown))}"
                )


def _checked_mesh(mesh: object) -> dict[str, int]:
    """Return a copy of ``DataConfig(mesh=...)``.

    Raises:
        ConfigurationError: it is no mapping from known names to sizes.
    """
    sizes = [*mesh.values()] if isinstance(mesh, Mapping) else []
    are_valid = all(type(size) is int and (size >= 1 or size == -1) for size in sizes) and sizes.count(-1) <= 1
    if not isinstance(mesh, Mapping) or not sizes or not are_valid:
        raise ConfigurationError(
            "[DT-101] DataConfig(mesh=...): expected a mapping from names to sizes >= 1, of which one may be -1, got "
            f"{mesh!r}"
        )
    mesh_kinds(list(mesh), "[DT-101] DataConfig(mesh=...)")
    return dict(mesh)
