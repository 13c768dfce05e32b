"""A tracker that writes the metrics of all runs of a user to one SQLite database."""

import sqlite3
from collections.abc import Sequence

from drivetrain import Run
from drivetrain.plugin import Entry, TrackerCallback, numbers

_SCHEMA = """
create table if not exists metrics (
    run text, iteration integer, name text, value real,
    primary key (run, iteration, name)
)
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
        """Connect, and return the last iteration that an earlier driver has logged."""
        self._run = run.id
        self._database = sqlite3.connect(self.path)
        self._database.execute(_SCHEMA)
        last = "select max(iteration) from metrics where run = ?"
        return self._database.execute(last, (run.id,)).fetchone()[0]

    def rewind(self, iteration: int) -> None:
        """Delete the iterations that will be reported again."""
        later = "delete from metrics where run = ? and iteration > ?"
        with self._database:
            self._database.execute(later, (self._run, iteration))

    def log(self, entries: Sequence[Entry]) -> None:
        """Insert values. Existing ones are replaced, because calls are retried."""
        rows = [
            (self._run, entry.iteration, name, value)
            for entry in entries
            for name, value in numbers(entry.metrics).items()
        ]
        with self._database:
            self._database.executemany(
                "insert or replace into metrics values (?, ?, ?, ?)", rows
            )

    def close(self, error: BaseException | None) -> None:
        """Disconnect at the end of the run."""
        self._database.close()
