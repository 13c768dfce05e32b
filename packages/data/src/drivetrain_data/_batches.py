"""From tables to batches: :func:`make_batches` has the stages in their order, a batch format what is made."""

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
    """An iterable whose every iteration is a new epoch, as with a data loader.

    Args:
        start_epoch: starts an iteration.
    """

    def __init__(self, start_epoch: Callable[[], Iterator[T]]) -> None:
        self._start_epoch = start_epoch

    def __iter__(self) -> Iterator[T]:
        return self._start_epoch()


class BatchFormat(Protocol):
    """What batches are made of, and how.

    Tables are prepared, cut into the sizes of the batches (where a batch spans several of them, they are joined), and
    converted.
    """

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[Any]:
        """Converts as much as can be converted before the sizes are cut.

        Args:
            tables: tables of any sizes.
            plan: how batches are made.
            fresh: nothing else refers to the memory of the tables.
        """
        ...

    def join(self, prepared: list[Any]) -> Any:
        """Makes one prepared table of several."""
        ...

    def convert(self, prepared: Any) -> Any:
        """Makes a batch of a prepared table of its size."""
        ...


@dataclass(frozen=True)
class TableBatches:
    """Batches that are made of a ``pyarrow.Table``.

    Attributes:
        convert: makes a batch.
    """

    convert: Callable[[pa.Table], Any]

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[pa.Table]:
        """See :class:`BatchFormat`: nothing to do."""
        return tables

    def join(self, prepared: list[pa.Table]) -> pa.Table:
        """See :class:`BatchFormat`."""
        import pyarrow as pa

        return pa.concat_tables(prepared)


@dataclass(frozen=True)
class ArrayBatches:
    """Batches that are made of :class:`Columns`.

    Attributes:
        convert: makes a batch.
        writable: the batch's arrays may be written to.
    """

    convert: Callable[[Columns], Any]
    writable: bool = False

    def prepare(self, tables: Iterator[pa.Table], plan: BatchPlan, fresh: bool) -> Iterator[Columns]:
        """See :class:`BatchFormat`: makes arrays of larger tables, so that a batch is a slice of them."""
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
    """Makes the batches of an epoch: prepares tables, cuts them to size, and converts them; some of it on a thread.

    Args:
        tables: the rows, in tables of any sizes.
        sizes: the sizes of the batches; None for all remaining rows.
        batch_format: makes the batches.
        plan: how batches are made.
        prefetch_batches: the number of batches that are made ahead on a thread.
        prefetch_tables: the thread only prepares the tables. Converting is so cheap that handing over each batch would
            take longer.
        fresh: nothing else refers to the memory of the tables.
        drop_last: leave out a last batch that is smaller than its size.
    """
    prepared = batch_format.prepare(tables, plan, fresh)
    if prefetch_tables:
        batch_size = plan.batch_size  # None: no table fills the only batch, so the thread reads all of them
        weight = (lambda rows: rows.num_rows / batch_size) if batch_size is not None else (lambda rows: 0.0)
        prepared = prefetch(prepared, prefetch_batches, weight)
    batches = map(batch_format.convert, rebatch(prepared, sizes, batch_format.join, drop_last=drop_last))
    return batches if prefetch_tables else prefetch(batches, prefetch_batches)


def to_tensors(batch: Mapping[str, np.ndarray[Any, Any]], dtypes: Any, device: Any) -> dict[str, Any]:
    """A batch of arrays as tensors on a device.

    Args:
        batch: arrays by name.
        dtypes: a torch dtype for all, or one by name; None for those of the arrays.
        device: where they are to be.
    """
    import torch

    stays = device is None or torch.device(device).type == "cpu"
    tensors = {}
    for name, array in batch.items():
        if array.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"iter_torch_batches(): expected columns of numbers, got column {name!r} of type {array.dtype}: "
                "make tensors of it in a collate_fn, or leave it out of the dataset"
            )
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if dtype is not None or not stays:
            tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        tensors[name] = tensor
    return tensors


def to_tf_tensors(batch: Mapping[str, np.ndarray[Any, Any]], dtypes: Any) -> dict[str, Any]:
    """A batch of arrays as tensors of TensorFlow.

    Args:
        batch: arrays by name.
        dtypes: a TensorFlow dtype for all, or one by name; None for those of the arrays.
    """
    import tensorflow as tf

    tensors = {}
    for name, array in batch.items():
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        try:
            tensors[name] = tf.cast(array, dtype) if dtype is not None else tf.convert_to_tensor(array)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"tensors are wanted, and the rows of column {name!r} cannot be one: {error}: leave it out of the "
                "dataset, or make tensors of iter_batches() yourself"
            ) from error
    return tensors
