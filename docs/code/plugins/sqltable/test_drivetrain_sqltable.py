import sqlite3

from drivetrain_sqltable import Table, TableDatasets

from drivetrain_testing import DatasetConformance


class TestTableDatasets(DatasetConformance):
    provider = TableDatasets
    rows_left_out = 1

    def make_dataset(self, directory, rows):
        path = directory / "data.db"
        with sqlite3.connect(path) as database:
            database.execute('create table train (id integer, "group" integer)')
            numbers = [(number, number // 10) for number in range(rows)]
            database.executemany("insert into train values (?, ?)", numbers)
        return Table(str(path), "train")
