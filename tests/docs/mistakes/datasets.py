import sqlite3

from drivetrain_sqltable import Table, TableDatasets

from tests.docs.mistakes.making import install, load, mistake, train

TABLES = """
from drivetrain_sqltable import Table
class TableDatasets(DatasetProvider):
    def accepts(self, dataset): return isinstance(dataset, Table)
    def split(self, opened, request): return []
plugin = TableDatasets
"""


def make_table():
    with sqlite3.connect("data.db") as database:
        database.execute("create table if not exists train (number integer)")
    return Table("data.db", "train")


@mistake("`divide()` instead of `split()`")
def other_method():
    load("dataset", TABLES.replace("split", "divide"))


@mistake("`accept()` instead of `accepts()`")
def misspelled():
    load("dataset", TABLES.replace("accepts", "accept"))


@mistake("a constructor that requires an argument")
def required_argument():
    load("dataset", TABLES + "plugin.__init__ = lambda self, path: None")


@mistake("fewer shards than ranks")
def few_shards():
    TableDatasets.split = lambda self, opened, request: ["one"]
    train(num_workers=2, datasets={"train": make_table()})


@mistake("an exception in `split()`")
def split_raises():
    TableDatasets.split = lambda self, opened, request: {}["rows"]
    train(num_workers=2, datasets={"train": make_table()})


@mistake("shards that hold an open file or a connection")
def connected_shards():
    class Connected:
        def __init__(self):
            self.database = sqlite3.connect("data.db")

        def iter_batches(self, *, batch_size=256):
            return self.database.execute("select * from train")

    Connected.__qualname__ = "Connected"
    TableDatasets.split = lambda self, opened, request: [Connected() for _ in range(request.world_size)]
    train(num_workers=2, datasets={"train": make_table()})


@mistake("two providers accept the object")
def two_providers():
    install("dataset", TABLES)
    train(datasets={"train": make_table()})


@mistake("`accepts()` raises, and no other provider accepts the object")
def accepts_raises():
    install("dataset", TABLES.replace("isinstance(dataset, Table)", "dataset.columns"))
    train(datasets={"train": {1, 2}})


@mistake("`accepts()` without `return`")
def accepts_returns_nothing():
    install("dataset", TABLES.replace("return isinstance", "isinstance"))
    train(datasets={"train": {1, 2}})


@mistake("no installed provider accepts the object")
def not_accepted():
    train(datasets={"train": {1, 2}})
