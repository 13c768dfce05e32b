"""Splits files, tables, data frames and Hugging Face datasets among the workers, and reads them in batches."""

from drivetrain_data._batches import Batches
from drivetrain_data._categories import Categories
from drivetrain_data._shard import Reader, TableShard
from drivetrain_data._sources import Source

__all__ = ["Batches", "Categories", "Reader", "Source", "TableShard"]

__version__ = "0.1.0"
