"""Files, tables, data frames and Hugging Face datasets for drivetrain: split among the workers, in batches."""

from drivetrain_data._batches import Batches
from drivetrain_data._shard import Reader, TableShard
from drivetrain_data._sources import Source

__all__ = ["Batches", "Reader", "Source", "TableShard"]
