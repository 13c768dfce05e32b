"""Converts tables to batches: :func:`make_batches` runs the stages, and a batch format converts the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from drivetrain import ConfigurationError
from drivetrain_data._columns import Columns
from drivetrain_data._tables import prefetch, rebatch, small_tables

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from drivetrain_data._plan import BatchPlan

__all__ = ["ArrayBatches", "BatchFormat", "Batches", "TableBatches", "make_batches", "to_tensors", "to_tf_tensors"]

T = TypeVar("T")


class Batches(Generic[T]):
    """An iterable that starts a new epoch with each iteration, like a data loader.

    Args:
        start_epoch: starts an epoch and returns its iterator.
    """

    def __init__(self, start_epoch: Callable[[], Iterator[T]]) -> None:
        self._start_epoch = start_epoch

    def __iter__(self) -> Iterator[T]:
        return self._start_epoch()


class BatchFormat(Protocol):
    """The type of batches, and the steps that create them.

    Tables are prepared, cut to the sizes of the batches (if a batch spans several tables, they are joined), and
    converted.
    """

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[Any]:
        """Convert as much as possible before the tables are cut to size.

        Args:
            tables: tables of any sizes.
            plan: the options of the batches.
            fresh: nothing else refers to the memory of the tables.
        """
        ...

    def join(self, prepared: list[Any]) -> Any:
        """Concatenate several prepared tables."""
        ...

    def convert(self, prepared: Any) -> Any:
        """Convert a prepared table to a batch of the same size."""
        ...


@dataclass(frozen=True)
class TableBatches:
    """Batches that are converted from a ``pyarrow.Table``.

    Attributes:
        convert: converts a table to a batch.
    """

    convert: Callable[[pa.Table], Any]

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[pa.Table]:
        """See :class:`BatchFormat`: returns the tables unchanged."""
        return tables

    def join(self, prepared: list[pa.Table]) -> pa.Table:
        """See :class:`BatchFormat`."""
        import pyarrow as pa

        return pa.concat_tables(prepared)


@dataclass(frozen=True)
class ArrayBatches:
    """Batches that are converted from :class:`Columns`.

    Attributes:
        convert: converts columns to a batch.
        writable: the arrays of a batch have to be writable.
    """

    convert: Callable[[Columns], Any]
    writable: bool = False

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[Columns]:
        """See :class:`BatchFormat`: converts tables of many batches to arrays, so that a batch is a slice of them."""
        fresh = fresh and plan.buffer_rows is None  # a shuffled table shares memory with the buffer
        for table in small_tables(tables, plan.batch_size):
            yield Columns.of(table, writable=self.writable, fresh=fresh)

    def join(self, prepared: list[Columns]) -> Columns:
        """See :class:`BatchFormat`."""
        return Columns.join(prepared)


def make_batches(
    tables: Iterator[pa.Table],
    sizes: Iterator[int | None],
    batch_format: BatchFormat,
    plan: BatchPlan,
    *,
    prefetch_batches: int,
    prefetch_tables: bool,
    fresh: bool,
    drop_last: bool,
) -> Iterator[Any]:
    """Create the batches of an epoch: prepare tables, cut them to size, and convert them, partly on a thread.

    Args:
        tables: the rows, in tables of any sizes.
        sizes: the sizes of the batches; None for all remaining rows.
        batch_format: creates the batches.
        plan: the options of the batches.
        prefetch_batches: the number of batches that a thread creates ahead.
        prefetch_tables: the thread only prepares the tables. Set it for formats whose conversion takes less time than
            passing a batch between threads.
        fresh: nothing else refers to the memory of the tables.
        drop_last: drop the last batch if it is smaller than its size.
    """
    prepared = batch_format.prepare(tables, plan, fresh)
    if prefetch_tables:
        batch_size = plan.batch_size  # None: all tables become one batch, so the thread reads all of them
        weight = (lambda rows: rows.num_rows / batch_size) if batch_size is not None else (lambda rows: 0.0)
        prepared = prefetch(prepared, prefetch_batches, weight)
    batches = map(batch_format.convert, rebatch(prepared, sizes, batch_format.join, drop_last=drop_last))
    return batches if prefetch_tables else prefetch(batches, prefetch_batches)


def to_tensors(batch: Mapping[str, np.ndarray[Any, Any]], dtypes: Any, device: Any) -> dict[str, Any]:
    """Convert a batch of arrays to tensors on a device.

    Args:
        batch: arrays by name.
        dtypes: a torch dtype for all arrays, or dtypes by name; None to keep the dtypes of the arrays.
        device: the device of the tensors.
    """
    import torch

    on_cpu = device is None or torch.device(device).type == "cpu"
    tensors = {}
    for name, array in batch.items():
        if array.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"iter_torch_batches(): expected numeric columns, got column {name!r} of type {array.dtype}. "
                "Convert it to tensors in a collate_fn, or drop it from the dataset"
            )
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if dtype is not None or not on_cpu:
            tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        tensors[name] = tensor
    return tensors


def to_tf_tensors(batch: Mapping[str, np.ndarray[Any, Any]], dtypes: Any) -> dict[str, Any]:
    """Convert a batch of arrays to TensorFlow tensors.

    Args:
        batch: arrays by name.
        dtypes: a TensorFlow dtype for all arrays, or dtypes by name; None to keep the dtypes of the arrays.
    """
    import tensorflow as tf

    tensors = {}
    for name, array in batch.items():
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        try:
            tensors[name] = tf.cast(array, dtype) if dtype is not None else tf.convert_to_tensor(array)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"column {name!r}: expected rows that TensorFlow can convert to a tensor, got an error: {error}. Drop "
                "the column from the dataset, or use iter_batches() and convert it yourself"
            ) from error
    return tensors
