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

from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import METRICS
from drivetrain.errors import ConfigurationError, StorageError

__all__ = ["RANK", "PartName", "existing_parts", "read_part", "take_rank"]

RANK = "_rank"
_ITERATION = "_training_iteration"
_NAME = re.compile(r"part-(\d{5})-(\d{12})-(\d{8})\.parquet")
_MAX_VALUES = 100_000_000
_BATCH_ROWS = 10_000


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
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            "the reports of this run are in Parquet files, which the package pyarrow reads. Run: pip install pyarrow"
        ) from None
    name = f"{METRICS}/{part}"
    last = min((later.after for later in parts if later.resume > part.resume), default=None)
    data = storage.read_bytes(name)
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data or b""))
        if file.metadata.num_rows * file.metadata.num_columns > _MAX_VALUES:
            raise StorageError(f"[DT-413] {storage.path(name)}: expected at most {_MAX_VALUES:,} values, got more")
        for batch in file.iter_batches(_BATCH_ROWS):
            rows = [{key: value for key, value in row.items() if value is not None} for row in batch.to_pylist()]
            yield [row for row in rows if last is None or _iteration_of(row) <= last]
    except pa.ArrowException as error:
        raise StorageError(
            f"[DT-413] {storage.path(name)}: expected a Parquet file, got something else ({error})"
        ) from error


def take_rank(report: dict[str, Any]) -> int:
    """Remove the rank from a report that :func:`read_part` has returned, and return it; -1 if it is missing."""
    rank = report.pop(RANK, None)
    return rank if isinstance(rank, int) else -1


def _iteration_of(row: dict[str, Any]) -> float:
    iteration = row.get(_ITERATION, 0)
    return iteration if isinstance(iteration, (int, float)) else 0
