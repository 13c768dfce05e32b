"""Datasets: what a trainer's ``datasets=`` takes, and the shard of each that a worker gets."""

from drivetrain.data.config import DataConfig
from drivetrain.data.shard import DatasetShard

__all__ = ["DataConfig", "DatasetShard"]
