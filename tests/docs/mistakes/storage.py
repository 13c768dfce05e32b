from sqlfs import SQLiteFileSystem

from tests.docs.mistakes.making import mistake, train


@mistake("a URI whose scheme is not installed")
def unknown_scheme():
    train(storage_path="sqlsf://runs")


@mistake("an unknown option in the URI")
def unknown_option():
    train(storage_path="sqlfs://runs?databse=runs.db")


@mistake("a URI together with `storage_filesystem`")
def uri_and_filesystem():
    train(storage_path="sqlfs://runs", storage_filesystem=SQLiteFileSystem("runs.db"))


@mistake("an object that is no filesystem")
def no_filesystem():
    train(storage_filesystem="sqlfs")
