"""An fsspec filesystem in an SQLite database: ``acme://runs`` in the file that ``ACME_DATABASE`` names."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
from typing import Any

from fsspec import AbstractFileSystem

__all__ = ["SqliteFileSystem"]

_SCHEMA = "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, data BLOB NOT NULL)"
_BELOW = "substr(path, 1, length(:start)) = :start"
_WAIT_S = 60.0


class SqliteFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec is released without types
    """Files are rows, and directories exist as long as they contain files, as in a bucket.

    Each operation is a transaction on a connection of its own. So any number of processes and threads may use the
    database, a file is visible only when all of it is written, and a move is atomic.

    Args:
        database: the path of the database; None for the value of the environment variable ``ACME_DATABASE``.
        **options: the options of every fsspec filesystem.
    """

    protocol = "acme"

    def __init__(self, database: str | None = None, **options: Any) -> None:
        super().__init__(database=database, **options)
        self._database = database or os.environ.get("ACME_DATABASE", "")
        if not self._database:
            raise ValueError("expected the path of a database in the environment variable ACME_DATABASE, got none")
        self._execute(_SCHEMA)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the entries of a directory, or the entry of a file."""
        path = self._strip_protocol(path)
        start = f"{path}/" if path else ""
        entries: dict[str, dict[str, Any]] = {}
        query = f"SELECT path, length(data) FROM files WHERE path = :path OR {_BELOW}"
        for name, size in self._execute(query, path=path, start=start):
            child, _, deeper = name[len(start) :].partition("/")
            kind = {"type": "directory", "size": 0} if deeper else {"type": "file", "size": size}
            entries[child] = {"name": start + child if child else path, **kind}
        if path and not entries:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else [entry["name"] for entry in entries.values()]

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Rename a file, and replace an existing one."""
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        self._execute("UPDATE OR REPLACE files SET path = :new WHERE path = :old", old=old, new=new)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file, or all files in a directory."""
        path = self._strip_protocol(path)
        self._execute(f"DELETE FROM files WHERE path = :path OR {_BELOW}", path=path, start=f"{path}/")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BytesIO:
        if mode == "wb":
            return _NewFile(self, path)
        for (data,) in self._execute("SELECT data FROM files WHERE path = :path", path=path):
            return io.BytesIO(data)
        raise FileNotFoundError(path)

    def _execute(self, statement: str, **values: Any) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self._database, timeout=_WAIT_S)) as connection, connection:
            return connection.execute(statement, values).fetchall()


class _NewFile(io.BytesIO):
    """A file that is stored when it is closed."""

    def __init__(self, filesystem: SqliteFileSystem, path: str) -> None:
        super().__init__()
        self._store = filesystem._execute
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self._store("INSERT OR REPLACE INTO files VALUES (:path, :data)", path=self._path, data=self.getvalue())
        super().close()
