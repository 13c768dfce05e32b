"""A worker's part of a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from drivetrain import ConfigurationError, SessionError, get_context
from drivetrain_data._batches import (
    ArrayBatches,
    Batches,
    BatchFormat,
    TableBatches,
    make_batches,
    to_tensors,
    to_tf_tensors,
)
from drivetrain_data._columns import Columns, is_array, to_frame
from drivetrain_data._plan import BatchPlan
from drivetrain_data._position import EpochState, Position
from drivetrain_data._tables import concatenate, shuffle, skip_rows

if TYPE_CHECKING:
    import pyarrow as pa
    import tensorflow as tf

__all__ = ["Reader", "Remainder", "TableShard"]

_FORMATS = ("default", "numpy", "pandas", "pyarrow", None)


class Reader(Protocol):
    """Reads a part of a dataset. A reader is pickled and sent to a worker, which calls its methods."""

    @property
    def fresh(self) -> bool:
        """True if nothing else refers to the memory of the tables that :meth:`tables` yields."""
        ...

    @property
    def converts(self) -> bool:
        """True if reading rows runs code of the user's dataset, such as a transform, or decodes values."""
        ...

    def tables(
        self,
        columns: Sequence[str] | None = None,
        skip: int = 0,
        *,
        epoch: int = 0,
        batch_rows: int | None = None,
    ) -> Iterator[pa.Table]:
        """Yield the rows, in order, in tables of any size.

        Args:
            columns: the names of the columns to read; None for all columns.
            skip: the number of rows to skip at the start.
            epoch: the number of the epoch, which determines the order of a shuffled stream.
            batch_rows: the number of rows in a batch, which a reader that converts rows converts at once; None if
                there are no batches.
        """
        ...

    def schema(self) -> pa.Schema:
        """Return the columns with their types."""
        ...


@dataclass(frozen=True, slots=True)
class TableShard:
    """The rows of a dataset that one worker reads: the return value of :func:`~drivetrain.get_dataset_shard`.

    The shards of a dataset that is split are disjoint, and together contain all rows. Their sizes differ by at most one
    row, and all ranks get the same number of batches. There are two exceptions. If batches have one row, the ranks with
    one more row get one more batch, unless ``drop_last`` is True. If rows are kept together, or if the number of rows
    is unknown, the sizes and the numbers of batches can differ by more.

    Attributes:
        name: the name of the dataset.
        reader: reads the rows.
        rows: the number of rows in this shard; None if it is unknown until all rows are read.
        largest_shard: the number of rows in the largest shard.
        smallest_shard: the number of rows in the smallest shard.
        total: the number of rows in the dataset; None if it is unknown until all rows are read.
        world_size: the number of shards into which the dataset is split; 1 if every worker reads all rows.
        is_shared: True if several workers read this shard, so that their batches must be the same.
        remainder: this rank's rows in the rest of the epoch during which the run's checkpoint was saved, if the unread
            rows of this epoch have to be split again; otherwise None.
    """

    name: str
    reader: Reader
    rows: int | None = None
    largest_shard: int = 0
    smallest_shard: int = 0
    total: int | None = None
    world_size: int = 1
    is_shared: bool = False
    remainder: Remainder | None = None
    _state: EpochState = field(default_factory=EpochState, init=False, repr=False, compare=False)

    def iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
        batch_format: Literal["default", "numpy", "pandas", "pyarrow"] | None = "default",
    ) -> Batches[Any]:
        """Return the rows in batches. Each iteration over the returned object reads one epoch.

        Args:
            batch_size: the number of rows in a batch; None for the whole shard in one batch.
            prefetch_batches: the number of batches that a thread creates ahead; 0 to use no thread. If creating a batch
                only slices arrays, the thread does not create batches: it reads the rows of this number of batches
                ahead.
            local_shuffle_buffer_size: shuffle the rows within a buffer of this many rows; None to keep their order.
            local_shuffle_seed: the seed of the shuffled order; None for a different order in each epoch, unless several
                workers read the same rows.
            drop_last: drop the last batch if it is not full.
            batch_format: the type of a batch. ``"numpy"``, ``"default"`` or None: a dict of arrays of shape
                ``(rows, ...)``. ``"pandas"``: a data frame. ``"pyarrow"``: a table.

        Raises:
            ConfigurationError: an argument is out of range, or a shard has too few rows for a batch.
        """
        if batch_format not in _FORMATS:
            raise ConfigurationError(
                f"[DT-748] iter_batches(batch_format=...): expected one of {', '.join(map(repr, _FORMATS))}, got "
                f"{batch_format!r}"
            )
        plan = self._plan(batch_size, local_shuffle_buffer_size, local_shuffle_seed, drop_last)
        if batch_format == "pyarrow":
            return self._batches(TableBatches(_unchanged), plan, prefetch_batches)
        if batch_format == "pandas":
            return self._batches(TableBatches(to_frame), plan, prefetch_batches)
        return self._batches(ArrayBatches(Columns.arrays), plan, prefetch_batches, only_slices=True)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = 256,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
    ) -> Batches[Any]:
        """Return the rows in batches of PyTorch tensors. Each iteration over the returned object reads one epoch.

        Args:
            batch_size: see :meth:`iter_batches`.
            prefetch_batches: see :meth:`iter_batches`.
            dtypes: a ``torch.dtype`` for all columns, or a mapping from column names to dtypes; None to keep the types
                of the data.
            device: the device of the tensors; ``"auto"`` for the worker's device, None for the CPU.
            collate_fn: converts a dict of arrays to a batch. ``dtypes`` and ``device`` are then ignored.
            local_shuffle_buffer_size: see :meth:`iter_batches`.
            local_shuffle_seed: see :meth:`iter_batches`.
            drop_last: see :meth:`iter_batches`.

        Raises:
            ConfigurationError: see :meth:`iter_batches`; or, without a ``collate_fn``, a column is not numeric.
        """
        plan = self._plan(batch_size, local_shuffle_buffer_size, local_shuffle_seed, drop_last)
        target = _worker_device() if isinstance(device, str) and device == "auto" else device

        def convert(columns: Columns) -> Any:
            arrays = columns.arrays()
            return collate_fn(arrays) if collate_fn is not None else to_tensors(arrays, dtypes, target)

        batch_format = ArrayBatches(convert, writable=collate_fn is None)  # torch does not support read-only arrays
        only_slices = collate_fn is None and dtypes is None and str(target) in ("None", "cpu")
        return self._batches(batch_format, plan, prefetch_batches, only_slices=only_slices)

    def iter_tf_batches(
        self,
        *,
        batch_size: int | None = 256,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
    ) -> Batches[dict[str, tf.Tensor]]:
        """Return the rows in batches of TensorFlow tensors. Each iteration over the returned object reads one epoch.

        Args:
            batch_size: see :meth:`iter_batches`.
            prefetch_batches: see :meth:`iter_batches`.
            dtypes: a ``tf.DType`` for all columns, or a mapping from column names to dtypes; None to keep the types of
                the data.
            local_shuffle_buffer_size: see :meth:`iter_batches`.
            local_shuffle_seed: see :meth:`iter_batches`.
            drop_last: see :meth:`iter_batches`.

        Raises:
            ConfigurationError: see :meth:`iter_batches`; or the rows of a column have different shapes.
        """
        plan = self._plan(batch_size, local_shuffle_buffer_size, local_shuffle_seed, drop_last)
        batch_format = ArrayBatches(lambda columns: to_tf_tensors(columns.arrays(), dtypes))
        return self._batches(batch_format, plan, prefetch_batches)

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        batch_size: int = 256,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        drop_last: bool = False,
    ) -> tf.data.Dataset:
        """Return the rows as a ``tf.data.Dataset`` of (features, labels) pairs, which ``Model.fit`` accepts.

        This method reads one row to determine types and shapes. TensorFlow's automatic sharding is off, because the
        rows are already this worker's part of the data. A strategy divides each batch into as many pieces as there are
        replicas on all workers together. In each step, each replica of this worker processes one piece, so a batch
        lasts for several steps if there are several workers.

        TensorFlow reads ahead, so :meth:`state_dict` returns the start of the epoch until its last batch is read.

        Args:
            feature_columns: the name of one column, whose rows become one tensor of shape ``(batch_size, ...)``; or
                several names, whose columns become a dict of tensors.
            label_columns: one name or several names, as for ``feature_columns``.
            batch_size: see :meth:`iter_batches`. Under a strategy, it is the total number of rows that all workers
                process in a step.
            prefetch_batches: see :meth:`iter_batches`.
            dtypes: a ``tf.DType`` for all columns, or a mapping from column names to dtypes; None to keep the types of
                the data.
            local_shuffle_buffer_size: see :meth:`iter_batches`.
            local_shuffle_seed: see :meth:`iter_batches`.
            drop_last: see :meth:`iter_batches`. If it is False, the first dimension in the shape of a batch is None.

        Raises:
            ConfigurationError: see :meth:`iter_tf_batches`; or a column does not exist, or the shard has no rows.
        """
        import tensorflow as tf

        columns = self.schema().names
        selected = [name for given in (feature_columns, label_columns) for name in _names(given)]
        if missing := [name for name in selected if name not in columns]:
            raise ConfigurationError(
                f"[DT-748] to_tf(): expected columns of dataset {self.name!r} ({', '.join(columns)}), got "
                f"{missing[0]!r}"
            )
        plan = self._plan(batch_size, local_shuffle_buffer_size, local_shuffle_seed, drop_last)
        arrays = ArrayBatches(Columns.arrays)
        batches = self._batches(arrays, plan, prefetch_batches, only_slices=True, reads_ahead=True)

        def pair(batch: dict[str, Any]) -> tuple[Any, Any]:
            for name in selected if dtypes is None else ():
                if getattr(batch[name].dtype, "kind", "") == "f" and specs[name].dtype.is_integer:
                    raise ConfigurationError(
                        f"[DT-745] to_tf(): expected integers in column {name!r} of dataset {self.name!r}, as in its "
                        "first "
                        "row, got a missing value. Fill missing values, or set dtypes={...} with a floating type for "
                        "the column"
                    )
            features, labels = (
                batch[given] if isinstance(given, str) else {name: batch[name] for name in given}
                for given in (feature_columns, label_columns)
            )
            return features, labels

        table = next((table for table in self.reader.tables(batch_rows=1) if table.num_rows), None)
        if table is None:
            raise ConfigurationError(
                f"[DT-741] to_tf(): expected at least one row in dataset {self.name!r} to determine types and shapes, "
                "got none"
            )
        row = to_tf_tensors(Columns.of(table.slice(0, 1).select(selected)).arrays(), dtypes)
        rows = batch_size if drop_last else None
        specs = {name: tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype) for name, tensor in row.items()}
        dataset = tf.data.Dataset.from_generator(lambda: map(pair, batches), output_signature=pair(specs))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return dataset.with_options(options)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch. Save it with the model; :meth:`load_state_dict` resumes from it.

        The position assumes that all ranks have read the same number of batches as this rank. This is the case if they
        train together. After the loop over the batches has ended, the position is the start of the next epoch.

        Returns:
            Values that JSON can represent. The next checkpoint that rank 0 reports also stores them, so that the unread
            rows can be split if the run resumes with another number of workers.

        Raises:
            ConfigurationError: the rows are shuffled without a ``local_shuffle_seed``.
        """
        start = Position(self.total, self.world_size, epoch=self._state.epoch)
        position = self._state.current or self._state.resume_from or start
        plan = position.plan
        if plan is not None and plan.buffer_rows is not None and plan.seed is None:
            raise ConfigurationError(
                f"[DT-746] state_dict() of dataset {self.name!r}: expected a reproducible order, got "
                "local_shuffle_buffer_size "
                "without a seed. Add local_shuffle_seed=..., with a different value for each epoch"
            )
        self._state.last_saved = state = position.as_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration over batches resume an epoch. Later iterations read all rows again.

        With the same number of workers, the remaining batches are the same as without the interruption. With another
        number, the unread rows are split again; if there are fewer unread rows than workers, some workers get none.

        Args:
            state: the return value of :meth:`state_dict`, from any rank.

        Raises:
            ConfigurationError: the state belongs to another dataset; or the unread rows have to be split again, and
                this is impossible. The reason is then that the state was not reported with the checkpoint from which
                the run resumes, that rows are kept together, or that the dataset can only be iterated over.
        """
        position = Position.from_dict(state)
        if position.total != self.total:
            raise ConfigurationError(
                f"[DT-746] dataset {self.name!r}: expected the state of a dataset with {self.total} rows, got the "
                "state of a "
                f"dataset with {position.total} rows"
            )
        has_same_split = position.world_size == self.world_size and position.remaining_rows is None
        if not has_same_split and (self.remainder is None or self.remainder.position != position):
            raise ConfigurationError(
                f"[DT-746] dataset {self.name!r}: expected the state of an epoch that was split once, among "
                f"{self.world_size} "
                f"workers, got one that was split {'again, ' if position.remaining_rows else ''}among "
                f"{position.world_size} workers. "
                "The unread rows can only be split again if rank 0 reported the state with the checkpoint that the run "
                "resumes from, and if the dataset is neither an IterableDataset nor split with keep_together. "
                "Resume with the same number of workers, or restart the epoch"
            )
        at_start = not position.batches and position.remaining_rows is None
        self._state.resume_from = None if at_start else position
        self._state.epoch = position.epoch
        self._state.current = None

    @property
    def is_epoch_read(self) -> bool:
        """True if all rows of the current epoch were read, and the loop over its batches has not ended yet."""
        current = self._state.current
        return current is not None and self.total is not None and not current.unread()

    def take_state(self) -> dict[str, Any] | None:
        """Return the last value that :meth:`state_dict` returned since the previous call of this method, or None.

        The session calls it and stores the value in a checkpoint.
        """
        state, self._state.last_saved = self._state.last_saved, None
        return state

    def iter_tables(self) -> Iterator[pa.Table]:
        """Yield the tables as they are read, without copying their rows."""
        return self.reader.tables()

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts of Python values."""
        for table in self.reader.tables():
            yield from table.to_pylist()

    def to_table(self) -> pa.Table:
        """Return all rows as a table in memory."""
        tables = list(self.reader.tables())
        return concatenate(tables) if tables else self.schema().empty_table()

    def to_pandas(self) -> Any:
        """Return all rows as a pandas data frame."""
        return to_frame(self.to_table())

    def schema(self) -> pa.Schema:
        """Return the columns with their types."""
        return self.reader.schema()

    def count(self) -> int:
        """Return the number of rows in this shard. If it is unknown, read all rows to count them."""
        return self.rows if self.rows is not None else sum(table.num_rows for table in self.reader.tables())

    def _plan(self, batch_size: int | None, buffer_rows: int | None, seed: int | None, drop_last: bool) -> BatchPlan:
        for name, value in (("batch_size", batch_size), ("local_shuffle_buffer_size", buffer_rows)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(f"[DT-748] {name}: expected an integer >= 1, or None, got {value!r}")
        if self.rows is not None:
            minimum = batch_size if drop_last and batch_size is not None else 1
            if self.smallest_shard < minimum <= max(self.largest_shard, minimum if drop_last else 0):
                raise ConfigurationError(
                    f"[DT-748] dataset {self.name!r}: expected at least {minimum} rows per shard for a batch"
                    f"{' (drop_last=True)' if drop_last else ''}, got a shard with {self.smallest_shard}. "
                    "Use a smaller batch_size, fewer workers, or DataConfig(datasets_to_split=[...]) without this "
                    "dataset"
                )
        if self.is_shared and buffer_rows is not None and seed is None:
            raise ConfigurationError(
                f"[DT-748] dataset {self.name!r}: expected a local_shuffle_seed, because several workers read the same "
                "rows and would shuffle them differently, got None. Add local_shuffle_seed=..., with a different value "
                "for each epoch"
            )
        return BatchPlan(batch_size, drop_last, buffer_rows, seed)

    def _batches(
        self,
        batch_format: BatchFormat,
        plan: BatchPlan,
        prefetch_batches: int,
        *,
        only_slices: bool = False,
        reads_ahead: bool = False,
    ) -> Batches[Any]:
        """Return an object that reads one epoch of batches with each iteration over it.

        Args:
            batch_format: converts tables to batches.
            plan: the options that determine the batches.
            prefetch_batches: see :meth:`iter_batches`.
            only_slices: True if creating a batch only slices arrays, provided that all columns are numeric.
            reads_ahead: see :meth:`EpochState.track`.
        """
        if type(prefetch_batches) is not int or prefetch_batches < 0:
            raise ConfigurationError(f"[DT-748] prefetch_batches: expected an integer >= 0, got {prefetch_batches!r}")
        only_slices = (
            only_slices
            and self.rows is not None
            and not self.reader.converts
            and all(is_array(kind) for kind in self.schema().types)
        )

        def start_epoch() -> Iterator[Any]:
            shard, position = self._start_epoch(plan)
            tables, sizes = shard._rest_of_epoch(plan, position.batches, position.epoch)
            batches = make_batches(
                tables,
                sizes,
                batch_format,
                plan,
                prefetch_batches=prefetch_batches,
                prefetch_tables=only_slices,
                fresh=shard.reader.fresh,
                drop_last=plan.drop_last and shard.rows is None,  # otherwise, the sizes already omit the last batch
            )
            return self._state.track(position, batches, reads_ahead=reads_ahead)

        return Batches(start_epoch)

    def _start_epoch(self, plan: BatchPlan) -> tuple[TableShard, Position]:
        """Return the shard from which the next epoch is read, and the position at which this epoch starts."""
        resumed, self._state.resume_from = self._state.resume_from, None
        epoch = self._state.epoch
        self._state.epoch += 1
        if resumed is None:
            return self, Position(self.total, self.world_size, plan=plan, epoch=epoch)
        if resumed.world_size != self.world_size:
            assert self.remainder is not None
            rest = tuple(resumed.unread())
            return self.remainder.shard, Position(self.total, self.world_size, rest, plan=plan, epoch=epoch)
        if resumed.batches and resumed.plan != plan:
            self._state.resume_from, self._state.epoch = resumed, epoch
            raise ConfigurationError(
                f"[DT-746] dataset {self.name!r}: expected the same batch options as in the epoch that is resumed, "
                f"{resumed.plan}, got {plan}"
            )
        shard = self if resumed.remaining_rows is None or self.remainder is None else self.remainder.shard
        return shard, replace(resumed, plan=plan)

    def _rest_of_epoch(
        self, plan: BatchPlan, batches: int, epoch: int
    ) -> tuple[Iterator[pa.Table], Iterator[int | None]]:
        """Return the rows after the first ``batches`` batches of an epoch, and the sizes of the remaining batches."""
        if plan.batch_size is None and batches:  # the first batch had all rows
            return iter(()), iter(())
        sizes = self._batch_sizes(plan)
        read = sum(rows or 0 for rows in itertools.islice(sizes, batches))
        skip = read if plan.buffer_rows is None else 0
        tables = self.reader.tables(skip=skip, epoch=epoch, batch_rows=plan.batch_size)
        if self.rows is None and not batches:
            tables = self._require_rows(tables)
        if plan.buffer_rows is not None:
            tables = skip_rows(shuffle(tables, plan.buffer_rows, plan.seed), read)
        return tables, sizes

    def _require_rows(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Yield the tables of a stream, whose number of rows is unknown before they are read."""
        rows = 0
        for table in tables:
            rows += table.num_rows
            yield table
        if not rows:
            raise ConfigurationError(
                f"[DT-741] dataset {self.name!r}: expected at least one row for each worker, got none. Use fewer "
                "workers, or check how the stream is created"
            )

    def _batch_sizes(self, plan: BatchPlan) -> Iterator[int | None]:
        """Return the sizes of an epoch's batches. If the number of rows is unknown, None stands for all rows."""
        if self.rows is None:
            return itertools.repeat(plan.batch_size)
        return plan.batch_sizes(self.rows, largest_shard=self.largest_shard, smallest_shard=self.smallest_shard)


@dataclass(frozen=True, slots=True)
class Remainder:
    """The rest of an interrupted epoch, split among the current number of workers.

    Attributes:
        position: the position at which the epoch was interrupted.
        shard: this rank's shard of the rest of the epoch. If an earlier attempt has already split this rest among the
            same number of workers, the shard also includes the rows that this attempt has read.
    """

    position: Position
    shard: TableShard


def _unchanged(table: pa.Table) -> pa.Table:
    return table


def _names(columns: str | Sequence[str]) -> Sequence[str]:
    return [columns] if isinstance(columns, str) else columns


def _worker_device() -> Any:
    """Return torch's current GPU, or the CPU if no GPU is assigned to the worker."""
    import torch

    try:
        has_gpu = bool(get_context().worker.accelerator_ids)
    except SessionError:  # outside a train function
        has_gpu = False
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
