"""Names for providers of datasets, and for trainers that own the training loop."""

from drivetrain._base.lazy import publish
from drivetrain._base.mesh import DataPosition, data_position, mesh_kinds
from drivetrain._hooks.dataset import DatasetShard, SplitRequest, WorkerShard
from drivetrain._plugins.datasets import OpenedDataset, required_runtime
from drivetrain._worker.observer import note_batch

__all__ = [
    "DataPosition",
    "DatasetShard",
    "OpenedDataset",
    "SplitRequest",
    "WorkerShard",
    "data_position",
    "mesh_kinds",
    "note_batch",
    "required_runtime",
]

publish(__name__)
