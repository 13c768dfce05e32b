"""A tracker that writes the metrics of runs to an SQLite database."""

import contextlib
import math
import sqlite3
from collections.abc import Iterator, Sequence

from drivetrain.plugin import Run
from drivetrain_track import Entry, TrackerCallback, numbers

_SCHEMA = """
create table if not exists runs (id text primary key, name text, status text);
create table if not exists metrics (
    run text, iteration integer, name text, value real,
    primary key (run, iteration, name)
);
"""


class SQLiteTracker(TrackerCallback):
    """Write each metric as a row of the table `metrics`.

    Args:
        path: the database, which is created if it does not exist.
    """

    title = "SQLite"
    can_rewind = True

    def __init__(self, path: str = "metrics.db") -> None:
        super().__init__()
        self.path = path

    def open(self, run: Run) -> int | None:
        """Add the run, and return the last iteration of an earlier driver."""
        self._run = run.id
        with self._connect() as database:
            database.executescript(_SCHEMA)
            added = (run.id, run.name, "running")
            database.execute("insert or replace into runs values (?, ?, ?)", added)
            query = "select max(iteration) from metrics where run = ?"
            last: int | None = database.execute(query, (run.id,)).fetchone()[0]
            return last

    def rewind(self, iteration: int) -> None:
        """Delete the iterations that will be reported again."""
        later = "delete from metrics where run = ? and iteration > ?"
        with self._connect() as database:
            database.execute(later, (self._run, iteration))

    def log(self, entries: Sequence[Entry]) -> None:
        """Insert values. Existing ones are replaced, because calls are retried."""
        rows = [
            (self._run, entry.iteration, name, value)
            for entry in entries
            for name, value in numbers(entry.metrics).items()
            if not math.isnan(value)
        ]
        with self._connect() as database:
            insert = "insert or replace into metrics values (?, ?, ?, ?)"
            database.executemany(insert, rows)

    def close(self, error: BaseException | None) -> None:
        """Store how the run has ended."""
        status = "finished" if error is None else "failed"
        with self._connect() as database:
            update = "update runs set status = ? where id = ?"
            database.execute(update, (status, self._run))

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path)) as database, database:
            yield database
