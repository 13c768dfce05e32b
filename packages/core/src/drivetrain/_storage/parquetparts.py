"""Reads the Parquet files of :class:`drivetrain.loggers.ParquetLoggerCallback`.

The name of a file, such as ``part-00001-000000000080-00000003.parquet``, consists of a number that grows with every
resume, the iteration after which that resume continued, and a count. The rows of later iterations in earlier files are
void, because their reports were repeated.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from drivetrain._base.metrics import MAX_TEXT
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import METRICS
from drivetrain._storage.reading import damage_of
from drivetrain.errors import ConfigurationError, StorageError

__all__ = ["RANK", "PartName", "existing_parts", "ranks_in", "read_part", "take_rank"]

RANK = "_rank"
_ITERATION = "_training_iteration"
_NAME = re.compile(r"part-(\d{5})-(\d{12})-(\d{8})\.parquet")
_MAX_VALUES = 100_000_000
_MAX_BYTES = 1 << 30
_MAX_TEXT_BYTES = 4 * MAX_TEXT  # of at most four bytes for each character
_BATCH_VALUES = 100_000


class PartName(NamedTuple):
    """The name of a file.

    Attributes:
        resume: the number of resumes before its reports.
        after: the iteration after which the last of these resumes continued; 0 without a resume.
        number: the number of earlier files.
    """

    resume: int
    after: int
    number: int

    def __str__(self) -> str:
        return f"part-{self.resume:05}-{self.after:012}-{self.number:08}.parquet"

    def following(self) -> PartName:
        """Return the name of the next file."""
        return self._replace(number=self.number + 1)

    def resumed(self, iteration: int) -> PartName:
        """Return the name of the first file after a resume."""
        return PartName(self.resume + 1, iteration, self.number)


def existing_parts(storage: Storage) -> list[PartName]:
    """Return the files of a run, in the order in which they were written."""
    matches = map(_NAME.fullmatch, storage.list_names(METRICS)[1])
    return sorted(PartName(*map(int, match.groups())) for match in matches if match is not None)


def read_part(storage: Storage, part: PartName, parts: Sequence[PartName]) -> Iterator[list[dict[str, Any]]]:
    """Yield the reports in a file, in batches. A report has the rank as ``_rank``, and only the metrics with a value.

    Args:
        storage: the run directory.
        part: the file.
        parts: all files of the run. Reports that later ones replace are left out.

    Raises:
        StorageError: the file cannot be read, is damaged, or is too large.
        ConfigurationError: pyarrow is not installed.
    """
    last = min((later.after for later in parts if later.resume > part.resume), default=None)
    for batch in _read_batches(storage, part, None):
        rows = [{key: value for key, value in row.items() if value is not None} for row in batch.to_pylist()]
        yield [row for row in rows if last is None or _iteration_of(row) <= last]


def ranks_in(storage: Storage, part: PartName) -> set[int]:
    """Return the ranks with reports in a file. Only their column is read.

    Raises:
        StorageError: the file cannot be read, is damaged, or is too large.
        ConfigurationError: pyarrow is not installed.
    """
    ranks = {rank for batch in _read_batches(storage, part, [RANK]) for rank in batch.column(0).unique().to_pylist()}
    return {rank for rank in ranks if isinstance(rank, int)}


def _read_batches(storage: Storage, part: PartName, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yield the rows of an untrusted file as record batches of limited size, with columns of plain values."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            "the reports of this run are in Parquet files, which the package pyarrow reads. Run: pip install pyarrow"
        ) from None
    name = f"{METRICS}/{part}"
    where = storage.path(name)
    source = io.BytesIO(storage.read_bytes(name) or b"")
    with damage_of(where):
        try:
            schema = pyarrow.parquet.read_schema(source)
            texts = [field.name for field in schema if pa.types.is_string(field.type)]
            # A text that is stored once is not expanded for each of its rows.
            file = pyarrow.parquet.ParquetFile(source, read_dictionary=texts)
            _check_size(file.metadata, where)
            _check_types(file.schema_arrow, where)
            rows = max(1, _BATCH_VALUES // max(1, len(schema)))
            for batch in file.iter_batches(rows, columns=columns):
                _check_texts(batch, where)
                yield batch
        except pa.ArrowException as error:
            raise StorageError(f"[DT-413] {where}: expected a Parquet file, got something else ({error})") from error


def _check_size(metadata: Any, where: str) -> None:
    count = metadata.num_rows * metadata.num_columns
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if count > _MAX_VALUES or size > _MAX_BYTES:
        raise StorageError(
            f"[DT-413] {where}: expected at most {_MAX_VALUES:,} values and {_MAX_BYTES:,} bytes, got {count:,} values "
            f"and {size:,} bytes"
        )


def _check_types(schema: Any, where: str) -> None:
    import pyarrow as pa

    for field in schema:
        kind = field.type
        is_text = pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type)
        if not is_text and kind not in (pa.bool_(), pa.int64(), pa.float64()):
            raise StorageError(
                f"[DT-413] {where}: expected columns of numbers, booleans and texts, got {str(kind)[:80]} in "
                f"{field.name[:80]!r}"
            )


def _check_texts(batch: Any, where: str) -> None:
    """Check the lengths of the texts before they are converted to one object for each row."""
    import pyarrow as pa
    import pyarrow.compute

    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            longest = pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py() or 0
            if longest > _MAX_TEXT_BYTES:
                raise StorageError(
                    f"[DT-413] {where}: expected texts of at most {_MAX_TEXT_BYTES:,} bytes, got {longest:,} bytes"
                )


def take_rank(report: dict[str, Any]) -> int:
    """Remove the rank from a report that :func:`read_part` has returned, and return it; -1 if it is missing."""
    rank = report.pop(RANK, None)
    return rank if isinstance(rank, int) else -1


def _iteration_of(row: dict[str, Any]) -> float:
    iteration = row.get(_ITERATION, 0)
    return iteration if isinstance(iteration, (int, float)) else 0
