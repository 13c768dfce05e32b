"""A filesystem of fsspec that stores files in an SQLite database."""

import contextlib
import io
import os
import sqlite3
from collections.abc import Iterator
from typing import Any

from fsspec import AbstractFileSystem

_SCHEMA = "create table if not exists files (path text primary key, data blob)"


class SQLiteFileSystem(AbstractFileSystem):
    """Files in the rows of a table.

    Args:
        database: the path of the database, which all workers can access.
    """

    protocol = "sqlfs"
    cachable = False

    def __init__(self, database: str = "files.db") -> None:
        super().__init__(database=database)
        self.database = os.path.abspath(database)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """List a directory. A directory exists if a file's path begins with it."""
        path = self._strip_protocol(path)
        start = f"{path}/" if path else ""
        found: dict[str, dict[str, Any]] = {}
        with self._connect() as database:
            query = """
                select path, length(data) from files
                where path = ? or substr(path, 1, ?) = ?
            """
            for name, size in database.execute(query, (path, len(start), start)):
                inner, is_deeper, _ = name[len(start) :].partition("/")
                kind = "directory" if is_deeper else "file"
                entry = name if name == path else start + inner
                found[entry] = {
                    "name": entry,
                    "size": 0 if is_deeper else size,
                    "type": kind,
                }
        if not found:
            raise FileNotFoundError(path)
        return [found[name] if detail else name for name in sorted(found)]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BytesIO:
        if mode == "wb":
            return _NewFile(self, path)
        with self._connect() as database:
            row = database.execute(
                "select data from files where path = ?", (path,)
            ).fetchone()
        if row is None:
            raise FileNotFoundError(path)
        return io.BytesIO(row[0])

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Rename a file in one transaction, and replace the target if it exists."""
        names = self._strip_protocol(path2), self._strip_protocol(path1)
        with self._connect() as database:
            database.execute(
                "update or replace files set path = ? where path = ?", names
            )

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        with self._connect() as database:
            database.execute(
                "delete from files where path = ?", (self._strip_protocol(path),)
            )

    def put(self, path: str, data: bytes) -> None:
        """Create or replace a file in one transaction."""
        with self._connect() as database:
            database.execute("insert or replace into files values (?, ?)", (path, data))

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        # A new connection for each call, because of forks and threads.
        with (
            contextlib.closing(sqlite3.connect(self.database, timeout=60)) as database,
            database,
        ):
            database.execute(_SCHEMA)
            yield database


class _NewFile(io.BytesIO):
    """A file that is stored when it is closed."""

    def __init__(self, filesystem: SQLiteFileSystem, path: str) -> None:
        super().__init__()
        self._filesystem, self._path = filesystem, path

    def close(self) -> None:
        if not self.closed:
            self._filesystem.put(self._path, self.getvalue())
        super().close()
