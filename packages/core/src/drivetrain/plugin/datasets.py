"""Names for providers of datasets, and for trainers that own the training loop."""

from drivetrain._base.lazy import publish
from drivetrain._hooks.dataset import DatasetShard, SplitRequest
from drivetrain._plugins.datasets import OpenedDataset, required_runtime

__all__ = [
    "DatasetShard",
    "OpenedDataset",
    "SplitRequest",
    "required_runtime",
]

publish(__name__)
