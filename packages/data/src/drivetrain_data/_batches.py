"""Converts tables to batches: :func:`make_batches` runs the steps, and a :class:`BatchFormat` implements them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from drivetrain import ConfigurationError
from drivetrain_data._columns import Columns
from drivetrain_data._tables import concatenate, prefetch, rebatch, small_tables

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
    """The steps that convert tables to batches of one type.

    Each table is prepared (:meth:`prepare`). The prepared tables are cut to the sizes of the batches, and the pieces of
    a batch that spans several tables are joined (:meth:`join`). The result is then converted to a batch
    (:meth:`convert`).
    """

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[Any]:
        """Do the part of the conversion that is possible before the tables are cut to the sizes of the batches.

        Args:
            tables: tables of any sizes.
            plan: the options that determine the batches.
            fresh: True if nothing else refers to the memory of the tables.
        """
        ...

    def join(self, prepared: list[Any]) -> Any:
        """Concatenate several prepared tables."""
        ...

    def convert(self, prepared: Any) -> Any:
        """Convert a prepared table, which was cut to size, to a batch of its rows."""
        ...


@dataclass(frozen=True)
class TableBatches:
    """The format of batches that are converted from a ``pyarrow.Table``.

    Attributes:
        convert: converts a table to a batch.
    """

    convert: Callable[[pa.Table], Any]

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[pa.Table]:
        """See :class:`BatchFormat`: returns the tables unchanged."""
        return tables

    def join(self, prepared: list[pa.Table]) -> pa.Table:
        """See :class:`BatchFormat`."""
        return concatenate(prepared)


@dataclass(frozen=True)
class ArrayBatches:
    """The format of batches that are converted from :class:`Columns`.

    Attributes:
        convert: converts columns to a batch.
        writable: True if the arrays of a batch have to be writable.
    """

    convert: Callable[[Columns], Any]
    writable: bool = False

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[Columns]:
        """See :class:`BatchFormat`: converts the rows of many batches to arrays at once; a batch is a slice of them."""
        fresh = fresh and plan.buffer_rows is None  # a shuffled table shares memory with the shuffle buffer
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
        sizes: the number of rows of each batch; None for a batch with all remaining rows.
        batch_format: implements the steps.
        plan: the options that determine the batches.
        prefetch_batches: the number of batches that a thread creates ahead; 0 to use no thread.
        prefetch_tables: True if the thread only prepares tables, and the consumer's thread creates the batches. This
            is faster for formats whose conversion takes less time than passing a batch between threads.
        fresh: True if nothing else refers to the memory of the tables.
        drop_last: drop the last batch if too few rows remain for its size.
    """
    prepared = batch_format.prepare(tables, plan, fresh)
    if prefetch_tables:
        batch_size = plan.batch_size  # if None, all tables become one batch, so the thread reads ahead without a limit
        weight = (lambda rows: rows.num_rows / batch_size) if batch_size is not None else (lambda rows: 0.0)
        prepared = prefetch(prepared, prefetch_batches, weight)
    batches = map(batch_format.convert, rebatch(prepared, sizes, batch_format.join, drop_last=drop_last))
    return batches if prefetch_tables else prefetch(batches, prefetch_batches)


def to_tensors(batch: Mapping[str, np.ndarray[Any, Any]], dtypes: Any, device: Any) -> dict[str, Any]:
    """Convert a batch of arrays to tensors on a device.

    Args:
        batch: a mapping from names to arrays.
        dtypes: a torch dtype for all arrays, or a mapping from names to dtypes; None to keep the dtypes of the arrays.
        device: the device of the tensors; None for the CPU.
    """
    import torch

    on_cpu = device is None or torch.device(device).type == "cpu"
    tensors = {}
    for name, array in batch.items():
        if array.dtype.kind not in "biuf":
            shapes = " whose rows have different shapes" if hasattr(next(iter(array), None), "shape") else ""
            raise ConfigurationError(
                f"[DT-745] iter_torch_batches(): expected numeric columns, got column {name!r} of type "
                f"{array.dtype}{shapes}. "
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
        batch: a mapping from names to arrays.
        dtypes: a TensorFlow dtype for all arrays, or a mapping from names to dtypes; None to keep the dtypes of the
            arrays.
    """
    import tensorflow as tf

    tensors = {}
    for name, array in batch.items():
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        try:
            tensors[name] = tf.cast(array, dtype) if dtype is not None else tf.convert_to_tensor(array)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"[DT-745] column {name!r}: expected rows that TensorFlow can convert to a tensor, got an error: "
                f"{error}. Drop "
                "the column from the dataset, or use iter_batches() and convert it yourself"
            ) from error
    return tensors
