"""What providers of datasets, and trainers that own the training loop, use."""

from drivetrain._hooks.dataset import DatasetShard, SplitRequest
from drivetrain._plugins.datasets import OpenedDataset, required_runtime

__all__ = [
    "DatasetShard",
    "OpenedDataset",
    "SplitRequest",
    "required_runtime",
]
