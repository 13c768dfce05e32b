from sqlfs import SQLiteFileSystem

from drivetrain_testing import StorageConformance


class TestSQLiteFileSystem(StorageConformance):
    def make_filesystem(self, directory):
        return SQLiteFileSystem(database=f"{directory}/files.db"), "runs"
