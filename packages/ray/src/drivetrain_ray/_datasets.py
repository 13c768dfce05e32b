"""Datasets of Ray Data: read by the cluster, and streamed to the workers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from drivetrain import ConfigurationError, ResourceError
from drivetrain.plugin import DatasetProvider, SplitRequest

__all__ = ["RayDatasets", "is_ray_dataset"]


def is_ray_dataset(dataset: object) -> bool:
    """Whether it is one of Ray Data's; imports nothing."""
    module = sys.modules.get("ray.data")
    kind = getattr(module, "Dataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


class RayDatasets(DatasetProvider):
    """Has Ray Data split a dataset among the workers, whose shards are ``ray.data.DataIterator``."""

    runtime: ClassVar[str | None] = "ray"

    def accepts(self, dataset: object) -> bool:
        """Whether it is one of Ray Data's."""
        return is_ray_dataset(dataset)

    def split(self, dataset: Any, request: SplitRequest) -> Sequence[Any]:
        """Streams a part of the rows to each worker, or all of them."""
        if request.keep_together is not None:
            raise ConfigurationError(
                f"dataset {request.name!r} is Ray's, which cannot keep rows together by {request.keep_together!r}: "
                "use another kind of dataset"
            )
        dataset.context.execution_options = _ingest_options(dataset, request)
        if not request.split:
            return [dataset.iterator()] * request.world_size
        hints = list(request.node_ids) if request.node_ids else None
        shards: Sequence[Any] = dataset.streaming_split(request.world_size, equal=True, locality_hints=hints)
        return shards

    @staticmethod
    def default_options() -> Any:
        """The ``ray.data.ExecutionOptions`` that are used where none are given."""
        from ray.data import ExecutionOptions

        return ExecutionOptions()


def _ingest_options(dataset: Any, request: SplitRequest) -> Any:
    """How Ray Data reads a dataset, which does not count on what the workers have."""
    import ray
    from ray.data import ExecutionResources
    from ray.data.dataset import MaterializedDataset

    options = copy.deepcopy(request.options or RayDatasets.default_options())
    excluded = getattr(options, "exclude_resources", None)  # which Ray is about to remove
    if options.resource_limits.cpu not in (None, float("inf")) or (excluded is not None and excluded.cpu):
        return options  # the user's own division of the cluster
    cluster: dict[str, float] = ray.cluster_resources()
    there, taken = cluster.get("CPU", 0.0), request.resources
    if there - taken.get("CPU", 0.0) < 1 and not isinstance(dataset, MaterializedDataset):
        raise ResourceError(
            f"dataset {request.name!r} is read by Ray Data, which wants at least one CPU beside those of the run, "
            f"found {there:g} CPUs in the cluster, of which the run takes {taken.get('CPU', 0.0):g}: use fewer "
            "workers, or ScalingConfig(resources_per_worker={'CPU': ...}) with fewer CPUs each"
        )
    options.resource_limits = ExecutionResources(
        cpu=there - taken.get("CPU", 0.0),
        gpu=cluster.get("GPU", 0.0) - taken.get("GPU", 0.0),
        object_store_memory=options.resource_limits.object_store_memory,
    )
    return options
