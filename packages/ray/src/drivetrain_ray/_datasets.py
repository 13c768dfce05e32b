"""The provider for Ray datasets."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from drivetrain import ResourceError
from drivetrain.plugin import DatasetProvider, SplitRequest, is_instance_of

__all__ = ["RayDatasets"]


class RayDatasets(DatasetProvider):
    """Makes Ray Data stream a part of a dataset to each worker, with the CPUs and GPUs that the run leaves free."""

    accepted = "a Ray dataset"
    runtimes = ("ray", "inprocess")

    def accepts(self, dataset: object) -> bool:
        """See :class:`drivetrain.plugin.DatasetProvider`."""
        return is_instance_of(dataset, "ray.data", "Dataset")

    def split(self, opened: Any, request: SplitRequest) -> Sequence[Any]:
        """See :class:`drivetrain.plugin.DatasetProvider`: each shard is a ``ray.data.DataIterator``."""
        opened.context.execution_options = self._options(opened, request)
        if request.whole:
            shards = [opened.iterator()] * request.world_size
        else:
            hints = list(request.node_ids) or None
            shards = opened.streaming_split(request.world_size, equal=True, locality_hints=hints)
        for shard in shards:  # an attribute rather than a wrapper, so that the shards keep Ray's class
            shard.iter_torch_batches = partial(_iter_torch_batches, shard)
        return shards

    def default_options(self) -> Any:
        """See :class:`drivetrain.plugin.DatasetProvider`: Ray's default ``ray.data.ExecutionOptions``."""
        from ray.data import ExecutionOptions

        return ExecutionOptions()

    def _options(self, dataset: Any, request: SplitRequest) -> Any:
        """Return the execution options, with resource limits that leave out the resources of the run."""
        import ray
        from ray.data import ExecutionResources
        from ray.data.dataset import MaterializedDataset

        options = copy.deepcopy(request.options or self.default_options())
        excluded = getattr(options, "exclude_resources", None)  # a future version of Ray removes this option
        if options.resource_limits.cpu not in (None, float("inf")) or (excluded is not None and excluded.cpu):
            return options  # the user has set limits
        cluster: dict[str, float] = ray.cluster_resources()
        total, taken = cluster.get("CPU", 0.0), request.resources.get("CPU", 0.0)
        if total - taken < 1 and not isinstance(dataset, MaterializedDataset):
            raise ResourceError(
                f"dataset {request.name!r}: expected at least one CPU for Ray Data in addition to the CPUs of the run, "
                f"got {total:g} CPUs in the cluster, of which the run takes {taken:g}. Use fewer workers, or "
                "ScalingConfig(resources_per_worker={'CPU': ...}) with fewer CPUs each"
            )
        options.resource_limits = ExecutionResources(
            cpu=total - taken,
            gpu=cluster.get("GPU", 0.0) - request.resources.get("GPU", 0.0),
            object_store_memory=options.resource_limits.object_store_memory,
        )
        return options


def _iter_torch_batches(shard: Any, **options: Any) -> Iterable[Any]:
    """Call the method of a ``ray.data.DataIterator``. By default, the tensors are on the worker's device.

    Ray determines the default device itself only in a run of Ray Train.
    """
    if options.get("device", "auto") == "auto" and options.get("collate_fn") is None:
        try:
            from drivetrain_torch import get_device
        except ModuleNotFoundError:  # the run uses another framework
            pass
        else:
            options["device"] = get_device()
    batches: Iterable[Any] = type(shard).iter_torch_batches(shard, **options)
    return batches
