import sqlite3
from collections import defaultdict
from contextlib import closing

from drivetrain_sqlog import SQLiteTracker

from drivetrain_track.testing import TrackerConformance


class TestSQLiteTracker(TrackerConformance):
    def make_tracker(self, directory):
        directory.mkdir(exist_ok=True)
        return SQLiteTracker(str(directory / "metrics.db"))

    def read_metrics(self, directory, result):
        metrics = defaultdict(list)
        with closing(sqlite3.connect(directory / "metrics.db")) as database:
            query = "select name, iteration, value from metrics"
            for name, iteration, value in database.execute(query):
                metrics[name].append((iteration, value))
        return metrics

    def read_status(self, directory, result):
        with closing(sqlite3.connect(directory / "metrics.db")) as database:
            return database.execute("select status from runs").fetchone()[0]
