"""Reads the reports of a run, and other files in a run directory that contain one JSON value per line."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import RESULT_FILE_PATTERN, USAGE_FILE, result_file
from drivetrain._storage.reading import MAX_LINE_BYTES, MAX_VALUES, Fields, count_values, parse_json
from drivetrain._storage.segments import growing_files
from drivetrain.errors import StorageError

__all__ = ["last_activity", "last_report", "line_too_long", "rank_files", "read_line", "read_lines", "tail_lines"]

_TAIL_BYTES = 1 << 16
_MAX_TAIL_BYTES = 256 << 20


def rank_files(storage: Storage) -> dict[int, str]:
    """Return a mapping from each rank with reports to the name of the file that contains these reports."""
    names = storage.list_names()[1] if storage.is_local else growing_files(storage)
    matches = [match for name in names if (match := RESULT_FILE_PATTERN.fullmatch(name))]
    return {int(match[1] or 0): match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))}


def last_report(storage: Storage, rank: int = 0) -> dict[str, Any] | None:
    """Return the last stored report of a rank, or None if there is none. Only the end of the file is read.

    Raises:
        StorageError: the report is not a JSON object, or its time or its iteration is not a number.
    """
    report = _last_line(storage, result_file(rank))
    if report is None:
        return None
    for name in ("_timestamp", "_training_iteration"):
        report.number(name, 0)
    return report.values


def last_activity(storage: Storage) -> float:
    """Return when rank 0 last reported, or when the resource usage was last recorded, as Unix time to within a second.

    The time is 0 if neither has happened, or if the files are damaged.
    """
    reported_at = sampled_at = 0.0
    with contextlib.suppress(StorageError):
        reported_at = float((last_report(storage) or {}).get("_timestamp", 0))
    with contextlib.suppress(StorageError):
        sample = _last_line(storage, USAGE_FILE)
        sampled_at = sample.number("time", 0) if sample is not None else 0.0
    if reported_at.is_integer() and reported_at:
        reported_at += 1.0  # it is rounded down
    return max(reported_at, sampled_at)


def _last_line(storage: Storage, name: str) -> Fields | None:
    """Return the JSON object in the last line of a file, or None if there is no line."""
    where = storage.path(name)
    for line in reversed(tail_lines(storage, name, 2)):
        try:
            value = parse_json(line, where)
        except StorageError:
            continue  # a process was killed while it wrote this line
        return Fields(value, where)
    return None


def tail_lines(storage: Storage, name: str, count: int, *, cut: bool = False) -> list[bytes]:
    """Return the last complete lines of a file, without line ends; an empty list if there is no file.

    Args:
        storage: the run directory.
        name: the file.
        count: the maximum number of lines.
        cut: if a line is too long, return the last part of the line instead of raising an error. A log can contain such
            a line, because a progress bar writes no line ends.

    Raises:
        StorageError: the lines are too long, or the file cannot be read.
    """
    try:
        with storage.open_file(name) as file:
            end = start = file.seek(0, os.SEEK_END)
            data = b""
            while start and data.count(b"\n") <= count:
                limit = _MAX_TAIL_BYTES if b"\n" in data else MAX_LINE_BYTES
                if len(data) >= limit and cut:
                    break
                if len(data) >= limit:
                    raise line_too_long(storage.path(name), f"the last {count} lines", limit)
                start = max(0, start - max(_TAIL_BYTES, len(data)))
                file.seek(start)
                data = file.read(end - start)
    except FileNotFoundError:
        return []
    if cut and b"\n" not in data and len(data) >= MAX_LINE_BYTES:
        return [data]
    whole = data.rpartition(b"\n")[0].split(b"\n")  # without an incomplete last line
    return [line for line in whole[-count:] if line]


def read_line(file: BinaryIO, where: str, start: bytes = b"") -> bytes:
    """Read the next line of a file, and return it with its line end.

    Args:
        file: the open file.
        where: its path, for error messages.
        start: the beginning of the line, if it has already been read. The returned line contains it.

    Raises:
        StorageError: the line, without ``start``, is longer than :data:`MAX_LINE_BYTES`.
    """
    line = file.readline(MAX_LINE_BYTES)
    if len(line) >= MAX_LINE_BYTES and not line.endswith(b"\n"):
        raise line_too_long(where)
    return start + line


def read_lines(storage: Storage, name: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file that contains one object per line. Other lines are skipped.

    Raises:
        StorageError: the file cannot be read, or contains too many values.
    """
    where = storage.path(name)
    values = 0
    for line in io.BytesIO(storage.read_bytes(name) or b""):
        values += count_values(line)
        if values > MAX_VALUES:
            raise StorageError(f"[DT-413] {where}: expected at most {MAX_VALUES:,} values in the whole file, got more")
        with contextlib.suppress(StorageError):
            yield Fields(parse_json(line, where), where).values


def line_too_long(where: str, what: str = "a line", limit: int = MAX_LINE_BYTES) -> StorageError:
    """Return the error about one or more lines that exceed a size limit.

    Args:
        where: the file.
        what: the lines, as the subject of the message.
        limit: the maximum number of bytes.
    """
    return StorageError(f"[DT-413] {where}: expected {what} to have at most {limit:,} bytes, got more")
