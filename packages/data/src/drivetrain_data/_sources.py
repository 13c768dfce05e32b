"""Opens datasets, and splits them into readers of disjoint rows: one shard per worker."""

from __future__ import annotations

import collections
import glob
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError
from drivetrain.plugin import SplitRequest, is_instance_of
from drivetrain_data._batches import to_numpy, without
from drivetrain_data._position import Interval, Position, split_rows
from drivetrain_data._shard import Reader, TableShard

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["ACCEPTED", "Source", "is_dataset", "open_dataset"]

_METADATA_THREADS = 16
_READ_BYTES, _READ_ROWS = 2**24, 131_072  # of a table that is read, at most
_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_FORMATS |= {".feather": "feather", ".arrow": "ipc"}
_CLASSES = {
    "datasets": ("Dataset", "IterableDataset"),
    "pandas": ("DataFrame",),
    "polars": ("DataFrame", "LazyFrame"),
    "pyarrow": ("RecordBatch", "Table"),
    "pyarrow.dataset": ("Dataset",),
}
ACCEPTED = (
    "a path to Parquet, CSV, JSON or Arrow files (or a list of them), a pandas or polars data frame, a pyarrow table "
    "or dataset, a Hugging Face dataset, a dict of arrays, or a function that returns one of these"
)


Piece = tuple[Any, Sequence[Interval]]
"""A fragment of a pyarrow dataset, with rows of it, in order."""


@dataclass(frozen=True, slots=True)
class TableReader:
    """Rows in memory."""

    table: pa.Table

    @property
    def fresh(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        return False

    def tables(self, columns: Sequence[str] | None = None, skip: int = 0) -> Iterator[pa.Table]:
        """See :class:`~drivetrain_data.Reader`."""
        table = self.table.slice(skip)
        yield table if columns is None else table.select(columns)

    def schema(self) -> pa.Schema:
        """See :class:`~drivetrain_data.Reader`."""
        return self.table.schema

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a stream of these rows alone: a slice would bring all of its table along."""
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
    """Rows of files.

    Attributes:
        pieces: fragments of a pyarrow dataset, each with the rows of it, in order.
        columns: the schema of all of them.
    """

    pieces: Sequence[Piece]
    columns: pa.Schema

    @property
    def fresh(self) -> bool:
        """See :class:`~drivetrain_data.Reader`: fragments of a user's dataset may be in memory."""
        import pyarrow.dataset as ds

        return all(isinstance(fragment, ds.FileFragment) for fragment, _ in self.pieces)

    def tables(self, columns: Sequence[str] | None = None, skip: int = 0) -> Iterator[pa.Table]:
        """See :class:`~drivetrain_data.Reader`."""
        pieces = collections.deque(self.pieces)
        while pieces and skip >= (count := sum(stop - start for start, stop in pieces[0][1])):
            skip -= count
            pieces.popleft()
        yield from without(self._read_all(pieces, columns), skip)

    def _read_all(self, pieces: Iterable[Piece], columns: Sequence[str] | None) -> Iterator[pa.Table]:
        for fragment, rows in _joined(pieces):
            yield from self._read(fragment, rows, columns)

    def _read(self, fragment: Any, rows: Sequence[Interval], columns: Sequence[str] | None) -> Iterator[pa.Table]:
        import pyarrow as pa

        left = collections.deque(rows)
        end = 0
        for batch in fragment.to_batches(schema=self.columns, columns=columns, **_scan_options(fragment)):
            begin, end = end, end + batch.num_rows
            parts = []
            while left and left[0][0] < end:
                start, stop = left.popleft()
                parts.append(batch.slice(start - begin, min(stop, end) - start))
                if stop > end:
                    left.appendleft((end, stop))
                    break
            if parts:
                yield pa.Table.from_batches(parts)
            if not left:
                return

    def schema(self) -> pa.Schema:
        """See :class:`~drivetrain_data.Reader`."""
        return self.columns


@dataclass(frozen=True, slots=True)
class HuggingFaceReader:
    """Rows of a ``datasets.Dataset`` or ``datasets.IterableDataset``."""

    dataset: Any
    chunk_rows: int = 1_000

    @property
    def fresh(self) -> bool:
        """See :class:`~drivetrain_data.Reader`."""
        return False

    def tables(self, columns: Sequence[str] | None = None, skip: int = 0) -> Iterator[pa.Table]:
        """See :class:`~drivetrain_data.Reader`."""
        dataset = self.dataset if columns is None else self.dataset.select_columns(list(columns))
        if skip and hasattr(dataset, "__len__"):  # one that is only iterated would skip other ranks' rows as well
            dataset, skip = dataset.skip(skip), 0
        yield from without(dataset.with_format("arrow").iter(batch_size=self.chunk_rows), skip)

    def schema(self) -> pa.Schema:
        """See :class:`~drivetrain_data.Reader`."""
        features = self.dataset.features
        return features.arrow_schema if features is not None else next(self.tables()).schema


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Row groups that follow one another in a file as one piece: it is opened once, and the next one read meanwhile."""
    import pyarrow.dataset as ds

    groups: list[int] = []
    joined: list[Interval] = []
    last, length = None, 0
    for fragment, rows in pieces:
        if not isinstance(fragment, ds.ParquetFileFragment):
            yield fragment, rows
            continue
        (group,) = fragment.row_groups
        if last is not None and (fragment.path != last.path or group.id <= groups[-1]):
            yield last.subset(row_group_ids=groups), joined
            groups, joined, length = [], [], 0
        groups.append(group.id)
        for start, stop in rows:
            adjoins = joined and joined[-1][1] == length + start
            joined.append((joined.pop()[0] if adjoins else length + start, length + stop))
        last, length = fragment, length + group.num_rows
    if last is not None:
        yield last.subset(row_group_ids=groups), joined


def _scan_options(fragment: Any) -> dict[str, Any]:
    """How a piece is read: little at a time, and little ahead; a local file not as a whole before it is decoded.

    Without Arrow's own threads, which would read many row groups ahead, and can abort a process that ends meanwhile.
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
    """A dataset that was opened."""

    @abstractmethod
    def split(self, request: SplitRequest) -> list[TableShard]:
        """One shard per worker; see :meth:`drivetrain.plugin.DatasetProvider.split`."""

    @abstractmethod
    def keeping_together(self, column: str) -> Source:
        """The same, but rows with equal values in a column stay in one part.

        Raises:
            ConfigurationError: there is no such column, or such rows are not next to each other.
        """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns, with their types."""


@dataclass(frozen=True, slots=True)
class Rows(Source):
    """Rows that can be counted without reading them.

    Attributes:
        name: of the dataset.
        count: of rows.
        part: makes the reader of some of them.
        starts: rows before which the dataset can be split; None for all.
    """

    name: str
    count: int
    part: Callable[[Sequence[Interval]], Reader]
    starts: np.ndarray[Any, Any] | None = None

    def split(self, request: SplitRequest) -> list[TableShard]:
        """See :class:`Source`: contiguous parts, which are the same in every attempt with as many workers."""
        parts = 1 if request.whole else request.world_size
        shards = self._shards(self._split_rows(parts))
        position = None if request.position is None else Position.from_dict(request.position)
        if position is not None and position.total == self.count and self.starts is None:
            same = position.world_size == parts
            if not same or position.rows is not None:
                rows = position.rows if same and position.rows is not None else position.unseen()
                rest = self._shards(split_rows(rows, parts))
                shards = [replace(shard, continued=(position, left)) for shard, left in zip(shards, rest, strict=True)]
        return [replace(shards[0]) for _ in range(request.world_size)] if request.whole else shards

    def _split_rows(self, parts: int) -> list[list[Interval]]:
        if (starts := self.starts) is None:
            return split_rows([(0, self.count)], parts)
        bounds = [self.count * rank // parts for rank in range(parts + 1)]
        bounds[1:-1] = [int(starts[abs(starts - bound).argmin()]) for bound in bounds[1:-1]]
        return [[bound] for bound in pairwise(bounds)]

    def _shards(self, parts: Sequence[Sequence[Interval]]) -> list[TableShard]:
        sizes = [sum(stop - start for start, stop in part) for part in parts]
        return [
            TableShard(
                self.name,
                self.part(part),
                rows=size,
                largest_shard=max(sizes),
                smallest_shard=min(sizes),
                total=self.count,
                world_size=len(parts),
            )
            for part, size in zip(parts, sizes, strict=True)
        ]

    def schema(self) -> pa.Schema:
        """See :class:`Source`."""
        return self.part([]).schema()

    def keeping_together(self, column: str) -> Rows:
        """See :class:`Source`: reads that column."""
        import numpy as np

        if column not in self.schema().names:
            raise ConfigurationError(
                f"dataset {self.name!r} wants a column {column!r} to keep rows together by, "
                f"found {', '.join(map(repr, self.schema().names))}"
            )
        tables = self.part([(0, self.count)]).tables([column])
        values = np.concatenate([to_numpy(table.column(0)) for table in tables])
        changes = np.flatnonzero(values[1:] != values[:-1]) + 1
        if len(changes) + 1 != len(np.unique(values)):
            raise ConfigurationError(
                f"dataset {self.name!r} wants rows of one {column!r} next to each other, found some apart: sort it by "
                f"{column!r}"
            )
        return replace(self, starts=np.concatenate([[0], changes, [self.count]]))


@dataclass(frozen=True, slots=True)
class Stream(Source):
    """A Hugging Face dataset that can only be read to its end.

    Attributes:
        name: of the dataset.
        dataset: a ``datasets.IterableDataset``.
    """

    name: str
    dataset: Any

    def split(self, request: SplitRequest) -> list[TableShard]:
        """See :class:`Source`: the number of rows of a part is unknown."""
        from datasets.distributed import split_dataset_by_node

        size = request.world_size
        if request.whole:
            parts = [self.dataset] * size
        else:
            parts = [split_dataset_by_node(self.dataset, rank, size) for rank in range(size)]
        world_size = 1 if request.whole else size
        return [TableShard(self.name, HuggingFaceReader(part), world_size=world_size) for part in parts]

    def keeping_together(self, column: str) -> Source:
        """See :class:`Source`: it cannot."""
        raise ConfigurationError(
            f"dataset {self.name!r} is only iterated, and so cannot keep rows together by {column!r}: use a dataset of "
            "known length"
        )

    def schema(self) -> pa.Schema:
        """See :class:`Source`."""
        return HuggingFaceReader(self.dataset).schema()


def is_dataset(value: object) -> bool:
    """Whether a value is of a kind that :func:`open_dataset` can open; imports nothing."""
    if isinstance(value, (str, os.PathLike, Mapping)):
        return True
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(path, (str, os.PathLike)) for path in value)
    return any(is_instance_of(value, module, name) for module, names in _CLASSES.items() for name in names)


def open_dataset(name: str, dataset: Any) -> Source:
    """Finds out how a dataset can be split.

    Args:
        name: the name of the dataset.
        dataset: a value for which :func:`is_dataset` is true.

    Raises:
        ConfigurationError: it cannot be opened.
    """
    import pyarrow.dataset as ds

    if is_instance_of(dataset, "datasets", "IterableDataset"):
        return Stream(name, dataset)
    if is_instance_of(dataset, "datasets", "Dataset"):
        return Rows(name, len(dataset), lambda rows: HuggingFaceReader(_select(dataset, rows)))
    table = _table_of(name, dataset)
    if table is None:
        files = dataset if isinstance(dataset, ds.Dataset) else _open_files(name, dataset)
        if not isinstance(files, ds.InMemoryDataset):
            return _rows_of_files(name, files)
        table = files.to_table()
    return Rows(name, table.num_rows, lambda rows: TableReader(_slices(table, rows)))


def _select(dataset: Any, rows: Sequence[Interval]) -> Any:
    ranges = [range(start, stop) for start, stop in rows]
    return dataset.select(ranges[0] if len(ranges) == 1 else list(itertools.chain.from_iterable(ranges)))


def _slices(table: pa.Table, rows: Sequence[Interval]) -> pa.Table:
    import pyarrow as pa

    slices = [table.slice(start, stop - start) for start, stop in rows]
    return pa.concat_tables(slices) if slices else table.slice(0, 0)


def _rows_of_files(name: str, dataset: Any) -> Rows:
    pieces = _pieces(dataset)
    columns: pa.Schema = dataset.schema

    def part(rows: Sequence[Interval]) -> Reader:
        chosen, position = [], 0
        for fragment, count in pieces:
            end = position + count
            inside = [
                (max(start, position) - position, min(stop, end) - position)
                for start, stop in rows
                if start < end and stop > position
            ]
            if inside:
                chosen.append((fragment, inside))
            position = end
        return FileReader(chosen, columns)

    return Rows(name, sum(rows for _, rows in pieces), part)


def _table_of(name: str, dataset: Any) -> pa.Table | None:
    """A dataset that is in memory, as a table; None for others."""
    import pyarrow as pa

    if isinstance(dataset, pa.Table):
        return dataset
    if isinstance(dataset, pa.RecordBatch):
        return pa.Table.from_batches([dataset])
    if is_instance_of(dataset, "pandas", "DataFrame"):
        return pa.Table.from_pandas(dataset, preserve_index=False)
    if is_instance_of(dataset, "polars", "LazyFrame"):
        dataset = dataset.collect()
    if is_instance_of(dataset, "polars", "DataFrame"):
        return dataset.to_arrow()
    if isinstance(dataset, Mapping):
        columns = {column: _column_of(values) for column, values in dataset.items()}
        lengths = {column: len(values) for column, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigurationError(f"dataset {name!r} wants columns of one length, found {lengths}")
        return pa.table(columns)
    return None


def _column_of(values: Any) -> Any:
    """An array or sequence as a column; further dimensions become tensors."""
    import numpy as np
    import pyarrow as pa

    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if not isinstance(values, np.ndarray) and not hasattr(values, "__array__"):
        return pa.array(values)
    array = np.asarray(values)
    return (
        pa.array(array) if array.ndim == 1 else pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
    )


def _open_files(name: str, dataset: Any) -> Any:
    import pyarrow as pa
    import pyarrow.dataset as ds

    given = [dataset] if isinstance(dataset, (str, os.PathLike)) else dataset
    paths = [os.fspath(path) for path in given]
    paths = [found for path in paths for found in (sorted(glob.glob(path)) if glob.has_magic(path) else [path])]
    if not paths:
        raise ConfigurationError(f"dataset {name!r} cannot be opened ({given}): no such file")
    files = [file for path in paths for file in (os.listdir(path) if os.path.isdir(path) else [path])]
    endings = {os.path.splitext(file)[1] for file in files}
    known = {_FORMATS.get(ending) for ending in endings} - {None}
    if len(known) > 1:
        raise ConfigurationError(f"dataset {name!r} wants files of one format, found {', '.join(sorted(endings))}")
    try:
        return ds.dataset(paths[0] if len(paths) == 1 else paths, format=known.pop() if known else "parquet")
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigurationError(f"dataset {name!r} cannot be opened ({given}): {error}") from error


def _pieces(dataset: Any) -> list[tuple[Any, int]]:
    """The smallest parts that can be read alone, with their rows: the row groups of Parquet files, or other files."""
    import pyarrow.dataset as ds

    def measure(fragment: Any) -> list[tuple[Any, int]]:
        if isinstance(fragment, ds.ParquetFileFragment):
            return [(part, part.row_groups[0].num_rows) for part in fragment.split_by_row_group()]
        return [(fragment, fragment.count_rows())]

    with ThreadPoolExecutor(_METADATA_THREADS) as pool:
        return [piece for pieces in pool.map(measure, dataset.get_fragments()) for piece in pieces]
