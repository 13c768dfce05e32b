"""Opens datasets, and splits them into one shard of disjoint rows per worker."""

from __future__ import annotations

import collections
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain import ConfigurationError
from drivetrain.plugin.backends import is_instance_of
from drivetrain.plugin.datasets import SplitRequest
from drivetrain_data._columns import to_numpy
from drivetrain_data._conversion import check_names, table_of
from drivetrain_data._files import OpenedFiles, inspect_fragments, open_files
from drivetrain_data._huggingface import HuggingFaceReader
from drivetrain_data._plan import Interval, count_rows, split_rows
from drivetrain_data._position import Position
from drivetrain_data._shard import Reader, Remainder, TableShard
from drivetrain_data._shuffled import ShuffledReader, divide
from drivetrain_data._tables import skip_rows

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["ACCEPTED", "Source", "is_dataset", "open_dataset"]

_READ_BYTES, _READ_ROWS = 2**24, 131_072  # maximum size of the tables that are read from Parquet files
_CLASSES = {
    "datasets": ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"),
    "pandas": ("DataFrame",),
    "polars": ("DataFrame", "LazyFrame"),
    "pyarrow": ("RecordBatch", "Table"),
    "pyarrow.dataset": ("Dataset",),
}
ACCEPTED = (
    "a path to Parquet, CSV, JSON or Arrow files (or a list of them), a pandas or polars data frame, a pyarrow table "
    "or dataset, a Hugging Face dataset, a dict of arrays, or a function that returns one of these"
)


class FragmentRows(NamedTuple):
    """Some rows of a fragment of a pyarrow dataset.

    Attributes:
        fragment: a ``pyarrow.dataset.Fragment``: a file, or a row group of a file.
        rows: the rows in order, numbered from the start of the fragment.
    """

    fragment: Any
    rows: Sequence[Interval]


@dataclass(frozen=True, slots=True)
class TableReader:
    """Reads rows from a table in memory."""

    table: pa.Table

    @property
    def fresh(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        return False

    @property
    def converts(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        return False

    def tables(
        self,
        columns: Sequence[str] | None = None,
        skip: int = 0,
        *,
        epoch: int = 0,
        batch_rows: int | None = None,
    ) -> Iterator[pa.Table]:
        """See :class:`~drivetrain_data.Reader`."""
        table = self.table.slice(skip)
        yield table if columns is None else table.select(columns)

    def schema(self) -> pa.Schema:
        """See :class:`~drivetrain_data.Reader`."""
        return self.table.schema

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows as an Arrow stream. Pickling a slice of a table would include the whole table."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as stream:
            stream.write_table(self.table)
        return _read_stream, (sink.getvalue(),)


def _read_stream(data: pa.Buffer) -> TableReader:
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        return TableReader(stream.read_all())


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads rows from files.

    Attributes:
        parts: the fragments to read, with the rows of each.
        columns: the schema of the dataset.
    """

    parts: Sequence[FragmentRows]
    columns: pa.Schema

    @property
    def fresh(self) -> bool:
        """See :class:`~drivetrain_data.Reader`: False if a fragment of the user's dataset is in memory."""
        import pyarrow.dataset as ds

        return all(isinstance(part.fragment, ds.FileFragment) for part in self.parts)

    @property
    def converts(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        return False

    def tables(
        self,
        columns: Sequence[str] | None = None,
        skip: int = 0,
        *,
        epoch: int = 0,
        batch_rows: int | None = None,
    ) -> Iterator[pa.Table]:
        """See :class:`~drivetrain_data.Reader`."""
        parts = collections.deque(self.parts)
        while parts and skip >= (rows := count_rows(parts[0].rows)):
            skip -= rows
            parts.popleft()
        yield from skip_rows(self._read_all(parts, columns), skip)

    def _read_all(self, parts: Iterable[FragmentRows], columns: Sequence[str] | None) -> Iterator[pa.Table]:
        for part in _merge_row_groups(parts):
            yield from self._read(part.fragment, part.rows, columns)

    def _read(self, fragment: Any, rows: Sequence[Interval], columns: Sequence[str] | None) -> Iterator[pa.Table]:
        import pyarrow as pa

        unread = collections.deque(rows)
        end = 0
        for batch in fragment.to_batches(schema=self.columns, columns=columns, **_scan_options(fragment)):
            begin, end = end, end + batch.num_rows
            slices = []
            while unread and unread[0][0] < end:
                start, stop = unread.popleft()
                slices.append(batch.slice(start - begin, min(stop, end) - start))
                if stop > end:
                    unread.appendleft((end, stop))
                    break
            if slices:
                yield pa.Table.from_batches(slices)
            if not unread:
                return

    def schema(self) -> pa.Schema:
        """See :class:`~drivetrain_data.Reader`."""
        return self.columns


def _merge_row_groups(parts: Iterable[FragmentRows]) -> Iterator[FragmentRows]:
    """Merge consecutive row groups of a file, so that Arrow opens the file once and reads the next group ahead."""
    import pyarrow.dataset as ds

    previous: Any = None  # the previous row group; all groups in the list below are in its file
    groups: list[int] = []
    merged: list[Interval] = []
    length = 0
    for fragment, rows in parts:
        if not isinstance(fragment, ds.ParquetFileFragment):
            yield FragmentRows(fragment, rows)
            continue
        (group,) = fragment.row_groups
        if previous is not None and (fragment.path != previous.path or group.id <= groups[-1]):
            yield FragmentRows(previous.subset(row_group_ids=groups), merged)
            groups, merged, length = [], [], 0
        groups.append(group.id)
        for start, stop in rows:
            adjoins = merged and merged[-1][1] == length + start
            merged.append((merged.pop()[0] if adjoins else length + start, length + stop))
        previous, length = fragment, length + group.num_rows
    if previous is not None:
        yield FragmentRows(previous.subset(row_group_ids=groups), merged)


def _scan_options(fragment: Any) -> dict[str, Any]:
    """Return options that make Arrow read a fragment in small parts, and read only little ahead.

    A local Parquet file is decoded while it is being read. Arrow's own threads are off: they would read many row groups
    ahead, and can abort a process that exits during a read.
    """
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    options: dict[str, Any] = {"use_threads": False, "batch_readahead": 1, "fragment_readahead": 1}
    if isinstance(fragment, ds.ParquetFileFragment):
        size = sum(group.total_byte_size for group in fragment.row_groups)
        rows = sum(group.num_rows for group in fragment.row_groups)
        options["batch_size"] = min(max(_READ_BYTES * rows // max(size, 1), 1), _READ_ROWS)
        if isinstance(fragment.filesystem, LocalFileSystem):
            options["fragment_scan_options"] = ds.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
    return options


class Source(ABC):
    """An opened dataset."""

    @abstractmethod
    def split(self, request: SplitRequest) -> list[TableShard]:
        """Return one shard per worker; see :meth:`drivetrain.plugin.DatasetProvider.split`."""

    @abstractmethod
    def keeping_together(self, column: str) -> Source:
        """Return the same dataset, but never separate rows with equal values in a column when it is split.

        Raises:
            ConfigurationError: the column does not exist, or rows with equal values are not contiguous.
        """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Return the columns with their types."""


@dataclass(frozen=True, slots=True)
class Rows(Source):
    """A dataset whose rows can be counted without reading them.

    Attributes:
        name: the name of the dataset.
        count: the number of rows.
        make_reader: returns a reader of the rows in the given intervals.
        boundaries: the numbers of the rows at which a shard may start, followed by ``count``; None if a shard may start
            at any row.
        parts: the number of rows in each part of the dataset that is read on its own, such as a row group of a Parquet
            file; None if any rows can be read.
    """

    name: str
    count: int
    make_reader: Callable[[Sequence[Interval]], Reader]
    boundaries: np.ndarray[Any, Any] | None = None
    parts: Sequence[int] | None = None

    def split(self, request: SplitRequest) -> list[TableShard]:
        """See :class:`Source`: the shards are contiguous, and depend only on the number of workers."""
        if request.shuffle_seed is not None:
            blocks = divide(self.parts or [self.count], request.shuffle_rows)
            options = (self.make_reader, blocks, request.shuffle_seed, request.shuffle_rows)
            shuffled = replace(self, make_reader=partial(ShuffledReader, *options))
            return shuffled.split(replace(request, shuffle_seed=None))
        number = 1 if request.whole else request.world_size
        if self.boundaries is None:
            shards = self._make_shards(split_rows([(0, self.count)], number))
        else:
            shards = self._make_shards(self._split_at_boundaries(self.boundaries, number))
        position = None if request.position is None else Position.from_dict(request.position)
        if position is not None and position.total == self.count and self.boundaries is None:
            shards = self._with_remainders(shards, position)
        return [replace(shards[0]) for _ in range(request.world_size)] if request.whole else shards

    def _with_remainders(self, shards: list[TableShard], position: Position) -> list[TableShard]:
        """Add a :class:`Remainder` to each shard, unless the interrupted epoch was split into the same shards."""
        if position.world_size != len(shards):
            intervals = position.unread()
        elif position.remaining_rows is not None:  # an earlier attempt has already split the unread rows again
            intervals = list(position.remaining_rows)
        else:
            return shards
        remaining = self._make_shards(split_rows(intervals, len(shards)))
        return [
            replace(shard, remainder=Remainder(position, unread))
            for shard, unread in zip(shards, remaining, strict=True)
        ]

    def _split_at_boundaries(self, boundaries: np.ndarray[Any, Any], number: int) -> list[list[Interval]]:
        bounds = [self.count * rank // number for rank in range(number + 1)]
        bounds[1:-1] = [int(boundaries[abs(boundaries - bound).argmin()]) for bound in bounds[1:-1]]
        return [[interval] for interval in pairwise(bounds)]

    def _make_shards(self, rows_of_shards: Sequence[Sequence[Interval]]) -> list[TableShard]:
        sizes = [count_rows(rows) for rows in rows_of_shards]
        return [
            TableShard(
                self.name,
                self.make_reader(rows),
                rows=size,
                largest_shard=max(sizes),
                smallest_shard=min(sizes),
                total=self.count,
                world_size=len(sizes),
            )
            for rows, size in zip(rows_of_shards, sizes, strict=True)
        ]

    def schema(self) -> pa.Schema:
        """See :class:`Source`."""
        return self.make_reader([(0, min(self.count, 1))]).schema()

    def keeping_together(self, column: str) -> Rows:
        """See :class:`Source`: reads the whole column."""
        import numpy as np

        if column not in self.schema().names:
            raise ConfigurationError(
                f"[DT-747] dataset {self.name!r}: expected a column {column!r} by which to keep rows together, "
                f"got {', '.join(map(repr, self.schema().names))}"
            )
        tables = self.make_reader([(0, self.count)]).tables([column])
        values = np.concatenate([to_numpy(table.column(0)) for table in tables])
        changes = np.flatnonzero(values[1:] != values[:-1]) + 1
        if len(changes) + 1 != len(np.unique(values)):
            raise ConfigurationError(
                f"[DT-747] dataset {self.name!r}: expected rows with the same {column!r} next to each other, got some "
                "apart. "
                f"Sort the dataset by {column!r}"
            )
        return replace(self, boundaries=np.concatenate([[0], changes, [self.count]]))


@dataclass(frozen=True, slots=True)
class Stream(Source):
    """A Hugging Face dataset that can only be iterated over.

    Attributes:
        name: the name of the dataset.
        dataset: a ``datasets.IterableDataset``.
    """

    name: str
    dataset: Any

    def split(self, request: SplitRequest) -> list[TableShard]:
        """See :class:`Source`: the number of rows of a shard is unknown."""
        from datasets.distributed import split_dataset_by_node

        size = request.world_size
        if request.shuffle_seed is not None:
            raise ConfigurationError(
                f"[DT-740] dataset {self.name!r}: expected a dataset of known length to shuffle it, got an "
                "IterableDataset. Call its method shuffle(seed=..., buffer_size=...) instead of DataConfig(shuffle=...)"
            )
        if request.whole:
            return [TableShard(self.name, self._reader(self.dataset)) for _ in range(size)]
        shards = [split_dataset_by_node(self.dataset, rank, size) for rank in range(size)]
        return [TableShard(self.name, self._reader(shard), world_size=size) for shard in shards]

    def keeping_together(self, column: str) -> Source:
        """Raise an error: a stream cannot keep rows together. See :class:`Source`."""
        raise ConfigurationError(
            f"[DT-747] dataset {self.name!r}: expected a dataset of known length to keep rows together by {column!r}, "
            "got an "
            "IterableDataset. Use a datasets.Dataset"
        )

    def schema(self) -> pa.Schema:
        """See :class:`Source`."""
        return self._reader(self.dataset).schema()

    def _reader(self, dataset: Any) -> HuggingFaceReader:
        return HuggingFaceReader(self.name, dataset, self.dataset.epoch)


def is_dataset(value: object) -> bool:
    """Return True if :func:`open_dataset` can open a value of this type. Import nothing to decide this."""
    if isinstance(value, (str, os.PathLike, Mapping)):
        return True
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(path, (str, os.PathLike)) for path in value)
    return any(is_instance_of(value, module, name) for module, names in _CLASSES.items() for name in names)


def open_dataset(name: str, dataset: Any) -> Source:
    """Open a dataset.

    Args:
        name: the name of the dataset.
        dataset: a value for which :func:`is_dataset` returns True.

    Raises:
        ConfigurationError: the dataset cannot be opened.
    """
    source = _open(name, dataset)
    if isinstance(source, Rows) and not source.count:
        raise ConfigurationError(
            f"[DT-741] dataset {name!r}: expected at least one row, got none. Check its path, or how it was "
            "filtered, or remove it from datasets={...}"
        )
    return source


def _open(name: str, dataset: Any) -> Source:
    import pyarrow.dataset as ds

    if is_instance_of(dataset, "datasets", "IterableDataset"):
        return Stream(name, dataset)
    if is_instance_of(dataset, "datasets", "Dataset"):
        return Rows(name, len(dataset), partial(_huggingface_reader, name, dataset))
    if any(is_instance_of(dataset, "datasets", kind) for kind in ("DatasetDict", "IterableDatasetDict")):
        splits = ", ".join(f"{split!r}: splits[{split!r}]" for split in dataset)
        raise ConfigurationError(
            f"[DT-744] dataset {name!r}: expected one split of a Hugging Face dataset, got a {type(dataset).__name__} "
            f"with the splits {', '.join(map(repr, dataset))}. Pass its splits: datasets={{{splits}}}"
        )
    table = table_of(name, dataset)
    if table is None:
        if not isinstance(dataset, ds.Dataset):
            return _rows_of_files(name, open_files(name, dataset))
        if not isinstance(dataset, ds.InMemoryDataset):
            return _rows_of_files(name, inspect_fragments(name, dataset))
        table = dataset.to_table()
    check_names(name, table.column_names)
    return Rows(name, table.num_rows, partial(_table_reader, TableReader(table)))


def _huggingface_reader(name: str, dataset: Any, rows: Sequence[Interval]) -> Reader:
    return HuggingFaceReader(name, _select(dataset, rows))


def _table_reader(whole: TableReader, rows: Sequence[Interval]) -> Reader:
    return TableReader(_slices(whole.table, rows))


def _select(dataset: Any, rows: Sequence[Interval]) -> Any:
    ranges = [range(start, stop) for start, stop in rows]
    return dataset.select(ranges[0] if len(ranges) == 1 else list(itertools.chain.from_iterable(ranges)))


def _slices(table: pa.Table, rows: Sequence[Interval]) -> pa.Table:
    import pyarrow as pa

    slices = [table.slice(start, stop - start) for start, stop in rows]
    return pa.concat_tables(slices) if slices else table.slice(0, 0)


def _rows_of_files(name: str, files: OpenedFiles) -> Rows:
    sizes = [count for _, count in files[0]]
    return Rows(name, sum(sizes), partial(_file_reader, files), parts=sizes)


def _file_reader(files: OpenedFiles, rows: Sequence[Interval]) -> Reader:
    fragments, columns = files
    parts, first = [], 0
    for fragment, count in fragments:
        end = first + count
        inside = [
            (max(start, first) - first, min(stop, end) - first) for start, stop in rows if start < end and stop > first
        ]
        if inside:
            parts.append(FragmentRows(fragment, inside))
        first = end
    return FileReader(parts, columns)
