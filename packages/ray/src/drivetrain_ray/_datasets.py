"""The provider for Ray datasets."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from drivetrain import ConfigurationError, ResourceError
from drivetrain.plugin import DatasetProvider
from drivetrain.plugin.backends import is_instance_of
from drivetrain.plugin.datasets import SplitRequest

__all__ = ["RayDatasets"]


class RayDatasets(DatasetProvider):
    """Makes Ray Data stream a part of a dataset to each worker, with the CPUs and GPUs that the run leaves free."""

    accepted = "a Ray dataset"
    runtimes = ("ray", "inprocess")

    def accepts(self, dataset: object) -> bool:
        """See :class:`drivetrain.plugin.DatasetProvider`."""
        return is_instance_of(dataset, "ray.data", "Dataset")

    def open(self, name: str, dataset: Any, *, keep_together: str | None = None) -> Any:
        """See :class:`drivetrain.plugin.DatasetProvider`. Only a materialized dataset knows its number of rows."""
        opened = super().open(name, dataset, keep_together=keep_together)
        if _rows(opened) == 0:
            raise ConfigurationError(
                f"[DT-741] dataset {name!r}: expected at least one row, got none. Check how it was created, or "
                "remove it from datasets={...}"
            )
        return opened

    def split(self, opened: Any, request: SplitRequest) -> Sequence[Any]:
        """See :class:`drivetrain.plugin.DatasetProvider`: each shard is a ``ray.data.DataIterator``."""
        from ray.data import Dataset

        rows = _rows(opened)
        if rows is not None and rows < request.world_size and not request.whole:
            raise ConfigurationError(
                f"[DT-741] dataset {request.name!r}: expected at least one row for each of {request.world_size} "
                f"workers, got {rows} rows. Use fewer workers, or DataConfig(datasets_to_split=[...]) without this "
                "dataset"
            )
        dataset = Dataset.copy(opened, _deep_copy=True)  # the user's dataset keeps its options
        dataset.context.execution_options = self._options(opened, request)
        if request.whole:
            shards = [dataset.iterator()] * request.world_size
        else:
            hints = list(request.node_ids) or None
            shards = dataset.streaming_split(request.world_size, equal=True, locality_hints=hints)
        return [self.adopt(shard) for shard in shards]

    def adopt(self, shard: Any) -> Any:
        """See :class:`drivetrain.plugin.DatasetProvider`: ``iter_torch_batches`` uses the worker's device."""
        if is_instance_of(shard, "ray.data", "DataIterator") and "iter_torch_batches" not in vars(shard):
            shard.iter_torch_batches = partial(_iter_torch_batches, shard)  # not a wrapper: the shard keeps Ray's class
        return shard

    def default_options(self) -> Any:
        """See :class:`drivetrain.plugin.DatasetProvider`: a copy of the options of the current ``DataContext``."""
        from ray.data import DataContext

        return copy.deepcopy(DataContext.get_current().execution_options)

    def _options(self, dataset: Any, request: SplitRequest) -> Any:
        """Return the user's options, with resource limits that leave out the resources of the run."""
        import ray
        from ray.data import ExecutionResources
        from ray.data.dataset import MaterializedDataset

        options = copy.deepcopy(request.options or dataset.context.execution_options)
        limits = options.resource_limits
        excluded = getattr(options, "exclude_resources", None)  # a future version of Ray removes this option
        if limits.cpu not in (None, float("inf")) or (excluded is not None and (excluded.cpu or excluded.gpu)):
            return options  # the user has set limits
        cluster: dict[str, float] = ray.cluster_resources()
        total, taken = cluster.get("CPU", 0.0), request.resources.get("CPU", 0.0)
        if total - taken < 1 and not isinstance(dataset, MaterializedDataset):
            raise ResourceError(
                f"[DT-749] dataset {request.name!r}: expected at least one CPU for Ray Data in addition to the CPUs of "
                "the run, "
                f"got {total:g} CPUs in the cluster, of which the run takes {taken:g}. Use fewer workers, or "
                "ScalingConfig(resources_per_worker={'CPU': ...}) with fewer CPUs each"
            )
        free_gpus = cluster.get("GPU", 0.0) - request.resources.get("GPU", 0.0)
        # Older versions of Ray have no limit of memory.
        memory = {"memory": limits.memory} if hasattr(limits, "memory") else {}
        options.resource_limits = ExecutionResources(
            cpu=total - taken,
            gpu=free_gpus if limits.gpu in (None, float("inf")) else limits.gpu,
            object_store_memory=limits.object_store_memory,
            **memory,
        )
        return options


def _rows(dataset: Any) -> int | None:
    """Return the number of rows of a materialized dataset; None for a dataset that has to be read to count them."""
    from ray.data.dataset import MaterializedDataset

    return int(dataset.count()) if isinstance(dataset, MaterializedDataset) else None


def _iter_torch_batches(shard: Any, **options: Any) -> Iterable[Any]:
    """Call the method of a ``ray.data.DataIterator``. By default, the tensors are on the worker's device.

    Ray determines the default device itself only in a run of Ray Train.
    """
    method = type(shard).iter_torch_batches
    # Older versions of Ray, which do not pin memory either, accept no device together with a collate_fn.
    accepts = options.get("collate_fn") is None or "pin_memory" in inspect.signature(method).parameters
    if accepts and options.get("device", "auto") == "auto":
        try:
            from drivetrain_torch import get_device
        except ModuleNotFoundError:  # the run uses another framework
            pass
        else:
            options["device"] = get_device()
    batches: Iterable[Any] = method(shard, **options)
    return batches
