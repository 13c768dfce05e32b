"""Reads files that may be damaged or hostile. Every file of a run directory is read through this module.

Only regular files are opened, no link below the run directory is followed, every file has a size limit, and deeply
nested JSON is rejected. A value of an unexpected type raises a :class:`~drivetrain.StorageError`, which names the file,
the expected type and the value.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.errors import StorageError

__all__ = [
    "MAX_LINE_BYTES",
    "MAX_VALUES",
    "Fields",
    "count_values",
    "damage_of",
    "is_damage",
    "is_number",
    "open_regular",
    "parse_json",
    "read_regular",
    "too_large",
]

MAX_LINE_BYTES = 16 << 20
"""The maximum length of a line in a file that is read in parts."""

MAX_VALUES = 4_000_000
"""The maximum number of values in a JSON document. A parsed value can take 30 times the memory of its text, so a limit
on the size of the file alone would allow too much memory."""

_TRANSFER_CODES = ("DT-405", "DT-406")
_MAX_DEPTH = 100
_MAX_SHOWN = 80


def too_large(where: str, size: int, limit: int) -> StorageError:
    """Return the error about a file that exceeds its size limit."""
    return StorageError(
        f"[DT-413] {where}: expected a file of at most {limit:,} bytes, got {size:,} bytes. It was not read"
    )


def open_regular(root: str, name: str) -> int:
    """Open a regular file below a directory for reading, without blocking or following a symbolic link.

    Args:
        root: the directory; it may itself be a symbolic link.
        name: the file's path relative to the directory.

    Returns:
        A file descriptor.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the path leaves the directory or contains a link, or the file is not a regular file.
    """
    where = posixpath.join(root, name)
    *parents, last = name.split("/")
    if ".." in parents or last in ("", ".", "..") or name.startswith("/"):
        raise StorageError(f"[DT-413] {root}: expected the name of a file in this directory, got {name!r}")
    descriptor = _open_directory(root, None)
    try:
        for parent in parents:
            _check_kind(os.stat(parent, dir_fd=descriptor, follow_symlinks=False), where, is_directory=True)
            inner = _open_directory(parent, descriptor)
            os.close(descriptor)
            descriptor = inner
        # Even opening a device can have an effect, so the kind is checked first, and again on the opened file.
        _check_kind(os.stat(last, dir_fd=descriptor, follow_symlinks=False), where)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(last, flags, dir_fd=descriptor)
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, where) from None
    finally:
        os.close(descriptor)
    try:
        _check_kind(os.fstat(file), where)
    except BaseException:
        os.close(file)
        raise
    return file


def read_regular(root: str, name: str, limit: int) -> bytes:
    """Read a whole regular file.

    Args:
        root: the directory, as in :func:`open_regular`.
        name: the file's path relative to the directory.
        limit: the maximum size in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: it is not a regular file in the directory, or it is too large.
    """
    with open(open_regular(root, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            data = file.read(size + 1)
            if len(data) > size:  # it is growing
                data += file.read(limit + 1 - len(data))
            size = len(data)
    if size > limit:
        raise too_large(posixpath.join(root, name), size, limit)
    return data


def _open_directory(path: str, directory: int | None) -> int:
    """Open a directory by its path, or by its name in another open directory. Only a path may contain links."""
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags if directory is None else flags | os.O_NOFOLLOW, dir_fd=directory)
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, path) from None


def _check_kind(status: os.stat_result, where: str, *, is_directory: bool = False) -> None:
    mode = status.st_mode
    if stat.S_ISREG(mode) or (is_directory and stat.S_ISDIR(mode)):
        return
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe"}
    kind = kinds.get(stat.S_IFMT(mode), "a device or a socket")
    raise StorageError(f"[DT-413] {where}: expected a regular file, got {kind}. It was not read")


def parse_json(data: bytes | str, where: str) -> Any:
    """Parse JSON. Reject a document with too many values, or one that is nested too deeply.

    Args:
        data: the JSON text.
        where: the file that contains the text, for error messages.

    Raises:
        StorageError: the text is not JSON, is nested too deeply, or has too many values. The cause is a ``ValueError``.
    """
    try:
        if count_values(data) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        value = json.loads(data)
        _check_depth(value, data)
        return value
    except RecursionError:
        cause = ValueError("nested too deeply")
    except MemoryError:
        cause = ValueError("too large for the memory of this machine")
    except ValueError as error:
        cause = error
    raise StorageError(f"[DT-413] {where}: expected JSON, got {_short(data)} ({cause})") from cause


def count_values(data: bytes | str) -> int:
    """Return an upper bound of the number of values in a JSON text, without parsing it."""
    commas, objects, lists = (b",", b"{", b"[") if isinstance(data, bytes) else (",", "{", "[")
    return 1 + data.count(commas) + data.count(objects) + data.count(lists)  # type: ignore[arg-type]


def is_damage(error: StorageError) -> bool:
    """Return True if an error is about the content of a file, and False if the storage could not be read."""
    if error.code in _TRANSFER_CODES:  # its cause can also be a ValueError, such as pyarrow's ArrowInvalid
        return False
    return isinstance(error.__cause__, (ValueError, MemoryError, RecursionError, type(None)))


def _check_depth(value: Any, data: bytes | str) -> None:
    """Raise a ``ValueError`` if a value is nested so deeply that recursive code could exceed Python's stack."""
    opened = data.count(b"[") + data.count(b"{") if isinstance(data, bytes) else data.count("[") + data.count("{")
    if opened <= _MAX_DEPTH:
        return
    if isinstance(value, list) and opened == len(value) + 1 and all(isinstance(child, dict) for child in value):
        return  # a list of flat objects, such as a million reports
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent)]
        level = [child for child in inner if isinstance(child, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def is_number(value: object) -> bool:
    """Return True if a value is a finite number that a float can represent. A bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Fields:
    """The fields of a JSON object. The type of each field is checked when it is read.

    The methods raise a :class:`~drivetrain.StorageError` if the field has another type, or if the field is missing or
    null and there is no default.

    Args:
        value: the parsed object.
        where: the file that contains the object, for error messages.

    Raises:
        StorageError: the value is not an object.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise StorageError(f"[DT-413] {where}: expected a JSON object, got {_short(value)}")
        self.values: dict[str, Any] = value
        self.where = where

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of a field that must be a string."""
        text: str = self._get(name, "a string", default, lambda value: isinstance(value, str))
        return text

    def number(self, name: str, default: float | None = None) -> float:
        """Return the value of a field that must be a finite number."""
        return float(self._get(name, "a finite number", default, is_number))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return the value of a field that must be an integer."""
        found: int = self._get(
            name, "an integer", default, lambda value: isinstance(value, int) and not isinstance(value, bool)
        )
        return found

    def mapping(self, name: str, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the value of a field that must be an object."""
        found: dict[str, Any] = self._get(name, "an object", default, lambda value: isinstance(value, dict))
        return found

    def items(self, name: str, default: list[Any] | None = None) -> list[Any]:
        """Return the value of a field that must be a list."""
        found: list[Any] = self._get(name, "a list", default, lambda value: isinstance(value, list))
        return found

    def _get(self, name: str, expected: str, default: Any, is_valid: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not is_valid(value):
            raise StorageError(f"[DT-413] {self.where}: expected {name!r} to be {expected}, got {_short(value)}")
        return value


@contextlib.contextmanager
def damage_of(where: str) -> Iterator[None]:
    """Convert errors that unexpected values cause in a ``with`` block into a StorageError.

    Use it around code that processes values from a run directory, so that one damaged run cannot affect other runs.
    This is a last resort: the functions that read values check them, and raise errors with more specific messages.

    Args:
        where: the run directory or the command, for the error message.
    """
    try:
        yield
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
        *(RecursionError, MemoryError, OSError),
    ) as error:
        raise StorageError(f"{where}: the run's files are damaged ({type(error).__name__}: {error})") from error


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} values"
    text = ascii(value[:_MAX_SHOWN]) if isinstance(value, (bytes, str)) else ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
