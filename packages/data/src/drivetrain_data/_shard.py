"""A worker's part of a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

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
from drivetrain_data._columns import Columns, is_array
from drivetrain_data._plan import BatchPlan
from drivetrain_data._position import EpochState, Position
from drivetrain_data._tables import shuffle, skip_rows

if TYPE_CHECKING:
    import pyarrow as pa
    import tensorflow as tf

__all__ = ["Reader", "Remainder", "TableShard"]

_FORMATS = ("default", "numpy", "pandas", "pyarrow", None)


class Reader(Protocol):
    """Reads a part of a dataset; it is pickled to the worker whose part it is."""

    @property
    def fresh(self) -> bool:
        """Whether nobody else has the memory of the tables that it reads."""
        ...

    def tables(self, columns: Sequence[str] | None = None, skip: int = 0) -> Iterator[pa.Table]:
        """The rows, in order, in tables of any size; with some columns only, and without the first rows."""
        ...

    def schema(self) -> pa.Schema:
        """The columns, with their types."""
        ...


@dataclass(frozen=True, slots=True)
class TableShard:
    """The rows of a dataset that one worker reads: the return value of :func:`~drivetrain.get_dataset_shard`.

    Shards are disjoint, cover the dataset, and differ by one row at most, unless rows are kept together. All ranks then
    get the same number of batches, but for batches of one row.

    Attributes:
        name: of the dataset.
        reader: reads the rows.
        rows: the number of rows; None if only reading reveals it.
        largest_shard: the rows of the largest shard.
        smallest_shard: the rows of the smallest shard.
        total: the rows of the dataset; None if only reading reveals their number.
        world_size: the number of different shards.
        remainder: this rank's shard of the epoch that the run's checkpoint interrupted, if it has to be split again.
    """

    name: str
    reader: Reader
    rows: int | None = None
    largest_shard: int = 0
    smallest_shard: int = 0
    total: int | None = None
    world_size: int = 1
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
        batch_format: str | None = "default",
    ) -> Batches[Any]:
        """The rows in batches; each iteration over what is returned is an epoch.

        Args:
            batch_size: rows of a batch; None for the whole shard in one.
            prefetch_batches: how many are made ahead, on a thread; where a batch is a slice of what was read, how many
                are read ahead.
            local_shuffle_buffer_size: mix the rows within a buffer of so many.
            local_shuffle_seed: of their order, which is another one each epoch without it.
            drop_last: leave out what does not fill a batch.
            batch_format: ``"numpy"`` (or ``"default"``), a dict of arrays of shape ``(rows, ...)``; ``"pandas"``, a
                data frame; or ``"pyarrow"``, a table.

        Raises:
            ConfigurationError: an argument is out of range, or a shard has no row for a batch.
        """
        if batch_format not in _FORMATS:
            raise ConfigurationError(
                f"iter_batches(batch_format=...): expected one of {', '.join(map(repr, _FORMATS))}, got "
                f"{batch_format!r}"
            )
        plan = self._plan(batch_size, local_shuffle_buffer_size, local_shuffle_seed, drop_last)
        if batch_format == "pyarrow":
            return self._batches(TableBatches(_unchanged), plan, prefetch_batches)
        if batch_format == "pandas":
            return self._batches(TableBatches(lambda table: table.to_pandas()), plan, prefetch_batches)
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
        """The rows in batches of PyTorch tensors; each iteration over what is returned is an epoch.

        Args:
            batch_size: see :meth:`iter_batches`.
            prefetch_batches: see :meth:`iter_batches`.
            dtypes: a ``torch.dtype`` for all columns, or one by name; None for those of the data.
            device: where the tensors are to be; ``"auto"`` for the worker's own.
            collate_fn: makes a batch from a dict of arrays, in place of ``dtypes`` and ``device``.
            local_shuffle_buffer_size: see :meth:`iter_batches`.
            local_shuffle_seed: see :meth:`iter_batches`.
            drop_last: see :meth:`iter_batches`.

        Raises:
            ConfigurationError: see :meth:`iter_batches`; or a column holds no numbers.
        """
        plan = self._plan(batch_size, local_shuffle_buffer_size, local_shuffle_seed, drop_last)
        place = _worker_device() if isinstance(device, str) and device == "auto" else device

        def convert(columns: Columns) -> Any:
            arrays = columns.arrays()
            return collate_fn(arrays) if collate_fn is not None else to_tensors(arrays, dtypes, place)

        batch_format = ArrayBatches(convert, writable=collate_fn is None)  # a tensor cannot view a read-only array
        only_slices = collate_fn is None and dtypes is None and str(place) in ("None", "cpu")
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
        """The rows in batches of TensorFlow tensors; each iteration over what is returned is an epoch.

        Args:
            batch_size: see :meth:`iter_batches`.
            prefetch_batches: see :meth:`iter_batches`.
            dtypes: a ``tf.DType`` for all columns, or one by name; None for those of the data.
            local_shuffle_buffer_size: see :meth:`iter_batches`.
            local_shuffle_seed: see :meth:`iter_batches`.
            drop_last: see :meth:`iter_batches`.

        Raises:
            ConfigurationError: see :meth:`iter_batches`; or rows of a column are not of one shape.
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
        """The rows as a ``tf.data.Dataset`` of pairs (features, labels), as ``Model.fit`` takes them.

        One row is read first, for its types and shapes. Automatic sharding is off, as these are this worker's own rows;
        a strategy of several replicas divides each batch among them in each step.

        Args:
            feature_columns: a column's name for one tensor of shape ``(batch_size, ...)``, or several names for a
                dict of them.
            label_columns: likewise.
            batch_size: see :meth:`iter_batches`; under a strategy, of a step on all workers.
            prefetch_batches: see :meth:`iter_batches`.
            dtypes: a ``tf.DType`` for all columns, or one by name; None for those of the data.
            local_shuffle_buffer_size: see :meth:`iter_batches`.
            local_shuffle_seed: see :meth:`iter_batches`.
            drop_last: see :meth:`iter_batches`; without it, the number of rows of a batch is not part of its shape.

        Raises:
            ConfigurationError: see :meth:`iter_tf_batches`; or a column does not exist.
        """
        import tensorflow as tf

        columns = self.schema().names
        wanted = [name for given in (feature_columns, label_columns) for name in _names(given)]
        if missing := [name for name in wanted if name not in columns]:
            raise ConfigurationError(
                f"to_tf(): expected columns of dataset {self.name!r} ({', '.join(columns)}), got {missing[0]!r}"
            )
        batches = self.iter_batches(
            batch_size=batch_size,
            prefetch_batches=prefetch_batches,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            drop_last=drop_last,
        )

        def pair(batch: dict[str, Any]) -> tuple[Any, Any]:
            for name in wanted if dtypes is None else ():
                if getattr(batch[name].dtype, "kind", "") == "f" and specs[name].dtype.is_integer:
                    raise ConfigurationError(
                        f"to_tf(): expected whole numbers in column {name!r} of dataset {self.name!r}, as in its first "
                        "row, got a missing one: fill the column, or give dtypes={...} with a floating type for it"
                    )
            features, labels = (
                batch[given] if isinstance(given, str) else {name: batch[name] for name in given}
                for given in (feature_columns, label_columns)
            )
            return features, labels

        table = next((table for table in self.reader.tables() if table.num_rows), None)
        if table is None:
            raise ConfigurationError(
                f"to_tf(): expected a row to take types and shapes from, found none in {self.name!r}"
            )
        row = to_tf_tensors(Columns.of(table.slice(0, 1).select(wanted)).arrays(), dtypes)
        rows = batch_size if drop_last else None
        specs = {name: tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype) for name, tensor in row.items()}
        made = tf.data.Dataset.from_generator(lambda: map(pair, batches), output_signature=pair(specs))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return made.with_options(options)

    def state_dict(self) -> dict[str, Any]:
        """The position in the current epoch. Save it with the model, and pass it to :meth:`load_state_dict` to resume.

        It assumes that all ranks have read as many batches as this one, as they do if they train together. After the
        loop over the batches has ended, it is the start of the next epoch.

        Returns:
            Values that JSON can represent. They also become part of the next checkpoint that rank 0 reports, so that a
            run that resumes with another number of workers can split the unread rows.

        Raises:
            ConfigurationError: the rows are mixed without a ``local_shuffle_seed``.
        """
        position = self._state.current or self._state.resume_from or Position(self.total, self.world_size)
        plan = position.plan
        if plan is not None and plan.buffer_rows is not None and plan.seed is None:
            raise ConfigurationError(
                f"the state of dataset {self.name!r}: expected an order that can be repeated, got "
                "local_shuffle_buffer_size without a seed: add local_shuffle_seed=..., another one each epoch"
            )
        self._state.last_saved = state = position.as_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration over batches resume an epoch. Later iterations read all rows again.

        With the same number of workers, the same batches follow as without the interruption. With another number, the
        unread rows are split again; if there are fewer of them than workers, some workers have none.

        Args:
            state: the return value of :meth:`state_dict`, from any rank.

        Raises:
            ConfigurationError: the state belongs to another dataset; or the number of workers has changed, and the
                state is not that of the checkpoint that the run resumes from, or the dataset can only be read from its
                start.
        """
        position = Position.from_dict(state)
        if position.total != self.total:
            raise ConfigurationError(
                f"dataset {self.name!r}: expected the state of one of {self.total} rows, got that of {position.total}"
            )
        of_this_shard = position.world_size == self.world_size and position.intervals is None
        if not of_this_shard and (self.remainder is None or self.remainder.position != position):
            raise ConfigurationError(
                f"dataset {self.name!r}: expected a state of {self.world_size} workers, got one of "
                f"{position.world_size}, which is only split anew if rank 0 reported it with the checkpoint that the "
                "run goes on from, and rows are neither kept together nor only iterated: go on with as many workers, "
                "or begin the epoch again"
            )
        at_start = not position.batches and position.intervals is None
        self._state.resume_from = None if at_start else position
        self._state.current = None

    def take_state(self) -> dict[str, Any] | None:
        """The latest return value of :meth:`state_dict` since the last call of this method. The session reports it."""
        state, self._state.last_saved = self._state.last_saved, None
        return state

    def iter_tables(self) -> Iterator[pa.Table]:
        """The rows in tables of the sizes in which they are read, without a copy."""
        return self.reader.tables()

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """The rows, each a dict of Python values."""
        for table in self.reader.tables():
            yield from table.to_pylist()

    def to_table(self) -> pa.Table:
        """All rows, in memory."""
        import pyarrow as pa

        tables = list(self.reader.tables())
        return pa.concat_tables(tables) if tables else self.schema().empty_table()

    def to_pandas(self) -> Any:
        """All rows, as a data frame."""
        return self.to_table().to_pandas()

    def schema(self) -> pa.Schema:
        """The columns, with their types."""
        return self.reader.schema()

    def count(self) -> int:
        """The number of rows; where only reading tells, it reads them all."""
        return self.rows if self.rows is not None else sum(table.num_rows for table in self.reader.tables())

    def _plan(self, batch_size: int | None, buffer_rows: int | None, seed: int | None, drop_last: bool) -> BatchPlan:
        for name, value in (("batch_size", batch_size), ("local_shuffle_buffer_size", buffer_rows)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(f"{name}: expected an integer of at least 1, or None, got {value!r}")
        if self.rows is not None:
            wanted = batch_size if drop_last and batch_size is not None else 1
            if self.smallest_shard < wanted <= max(self.largest_shard, wanted if drop_last else 0):
                raise ConfigurationError(
                    f"a batch of dataset {self.name!r}: expected {wanted} "
                    f"rows{' (drop_last=True)' if drop_last else ''}, "
                    f"and a shard has only {self.smallest_shard}: use a smaller batch_size, fewer workers, or "
                    "DataConfig(datasets_to_split=[...]) without this dataset"
                )
        return BatchPlan(batch_size, drop_last, buffer_rows, seed)

    def _batches(
        self, batch_format: BatchFormat, plan: BatchPlan, prefetch_batches: int, *, only_slices: bool = False
    ) -> Batches[Any]:
        """An iterable over epochs of batches.

        Args:
            batch_format: makes the batches.
            plan: how the rows become batches.
            prefetch_batches: the number of batches that are made ahead.
            only_slices: for columns of numbers, making a batch only slices arrays.
        """
        if type(prefetch_batches) is not int or prefetch_batches < 0:
            raise ConfigurationError(f"prefetch_batches: expected an integer of at least 0, got {prefetch_batches!r}")
        only_slices = only_slices and self.rows is not None and all(is_array(kind) for kind in self.schema().types)

        def start_epoch() -> Iterator[Any]:
            shard, position = self._start_epoch(plan)
            tables, sizes = shard._rest_of_epoch(plan, position.batches)
            batches = make_batches(
                tables,
                sizes,
                batch_format,
                plan,
                prefetch_batches=prefetch_batches,
                prefetch_tables=only_slices,
                fresh=shard.reader.fresh,
                drop_last=plan.drop_last and shard.rows is None,  # with known rows, the sizes leave the last batch out
            )
            return self._state.track(position, batches)

        return Batches(start_epoch)

    def _start_epoch(self, plan: BatchPlan) -> tuple[TableShard, Position]:
        """The shard that an epoch reads, and the position that it starts at."""
        resumed, self._state.resume_from = self._state.resume_from, None
        if resumed is None:
            return self, Position(self.total, self.world_size, plan=plan)
        if resumed.world_size != self.world_size:
            assert self.remainder is not None
            return self.remainder.shard, Position(self.total, self.world_size, tuple(resumed.unread()), plan=plan)
        if resumed.batches and resumed.plan != plan:
            self._state.resume_from = resumed
            raise ConfigurationError(
                f"the epoch of dataset {self.name!r} that is continued: expected batches made as before, "
                f"{resumed.plan}, "
                f"got {plan}"
            )
        shard = self if resumed.intervals is None or self.remainder is None else self.remainder.shard
        return shard, replace(resumed, plan=plan)

    def _rest_of_epoch(self, plan: BatchPlan, batches: int) -> tuple[Iterator[pa.Table], Iterator[int | None]]:
        """The rows after the first batches of an epoch, and the sizes of the batches that they become."""
        if plan.batch_size is None and batches:  # the first batch had all rows
            return iter(()), iter(())
        sizes = self._batch_sizes(plan)
        read = sum(rows or 0 for rows in itertools.islice(sizes, batches))
        if plan.buffer_rows is not None:
            tables = skip_rows(shuffle(self.reader.tables(), plan.buffer_rows, plan.seed), read)
        elif read:
            tables = self.reader.tables(skip=read)
        else:
            tables = self.reader.tables()
        return tables, sizes

    def _batch_sizes(self, plan: BatchPlan) -> Iterator[int | None]:
        """The sizes of the batches of an epoch; None for all rows in one batch, if their number is unknown."""
        if self.rows is None:
            return itertools.repeat(plan.batch_size)
        return plan.batch_sizes(self.rows, largest_shard=self.largest_shard, smallest_shard=self.smallest_shard)


@dataclass(frozen=True, slots=True)
class Remainder:
    """The unread rows of an interrupted epoch, split among the present number of workers.

    Attributes:
        position: the position at which the epoch was interrupted.
        shard: this rank's share of the unread rows.
    """

    position: Position
    shard: TableShard


def _unchanged(table: pa.Table) -> pa.Table:
    return table


def _names(columns: str | Sequence[str]) -> Sequence[str]:
    return [columns] if isinstance(columns, str) else columns


def _worker_device() -> Any:
    """The GPU that the worker's framework uses, or the CPU for a worker without one, whatever its machine has."""
    import torch

    try:
        has_gpu = bool(get_context().worker.accelerator_ids)
    except SessionError:  # outside a train function
        has_gpu = False
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
