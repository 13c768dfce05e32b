"""Parquet files as torch batches, with torch's own ``DataLoader`` in each of two processes.

These settings are the best ones here: no worker processes, as they do not help on two cores, and no collation, since
whole row groups are turned into tensors, and batches are slices of those.
"""

import pyarrow.parquet
import torch
import torch.multiprocessing
from ingesting import BATCH_ROWS, read
from stamps import options
from torch.utils.data import DataLoader, IterableDataset


class RowGroups(IterableDataset):
    def __init__(self, files, rank):
        self.files, self.rank = files, rank

    def __iter__(self):
        for path in self.files:
            file = pyarrow.parquet.ParquetFile(path)
            for group in range(self.rank, file.num_row_groups, 2):
                table = file.read_row_group(group)
                columns = {name: torch.tensor(table[name].to_numpy()) for name in table.column_names}
                for start in range(0, table.num_rows, BATCH_ROWS):
                    yield {name: column[start : start + BATCH_ROWS] for name, column in columns.items()}


def work(rank, config, files):
    torch.set_num_threads(1)
    loader = DataLoader(RowGroups(files, rank), batch_size=None, num_workers=0)
    read(config, lambda: loader)


if __name__ == "__main__":
    import glob

    config = options(data="")
    files = sorted(glob.glob(f"{config['data']}/*.parquet"))
    torch.multiprocessing.spawn(work, (config, files), nprocs=2)
