"""1 GB of floats in Parquet files as torch batches of 2 workers, 2 epochs, compared with a DataLoader and Ray Train.

16 files of 8 float32 columns, 31,250,000 rows in all, in batches of 8,192. On Ray both sides read with Ray Data and
the same ``streaming_split``.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, quantity

PAIRS = 3
LOADER, RAY_TRAIN, ON_RAY = "DataLoader", "Ray Train", "drivetrain on Ray"
FILES, ROWS, COLUMNS, GROUP_ROWS = 16, 1_953_125, 8, 122_071


def measure(bench: Bench) -> Iterator[Quantity]:
    data = {"data": make_data(bench.directory / "data")}
    runs = bench.alternate(
        {
            OURS: Job(script="ingest_drivetrain.py", arguments=data),
            LOADER: Job(script="ingest_dataloader.py", arguments=data),
            RAY_TRAIN: Job(script="ingest_raytrain.py", arguments=data, limit_s=600),
            ON_RAY: Job(script="ingest_drivetrain.py", arguments={**data, "runtime": "ray"}, limit_s=600),
        }
    )
    compared = [(OURS, LOADER), (OURS, RAY_TRAIN), (ON_RAY, RAY_TRAIN)]
    for epoch, goals in (
        (
            0,
            (
                Goal(bound=1.1, of=LOADER, at_least=True),
                Goal(bound=10.0, of=RAY_TRAIN, at_least=True),
                Goal(bound=1.0, of=RAY_TRAIN, at_least=True, side=ON_RAY),
            ),
        ),
        (1, ()),
    ):
        yield quantity(
            *(f"rows a second, epoch {epoch + 1}", "million/s", runs),
            lambda run, name=f"epoch_{epoch}": sum(run.facts(name, "rows")) / max(run.facts(name, "seconds")) / 1e6,
            *goals,
            compared=compared,
        )
    yield quantity(
        *("train function -> first batch", "s", runs, lambda run: run.last("first_batch") - run.last("train_function")),
        *(Goal(bound=0.6), Goal(bound=0.5, of=RAY_TRAIN, side=ON_RAY)),
        compared=compared,
    )
    yield quantity(
        *("start of everything -> first batch", "s", runs, lambda run: run.last("first_batch") - run.started),
        compared=compared,
    )
    yield quantity(
        *("peak memory of a worker", "MB", runs, lambda run: run.mean("weighed", "megabytes")), compared=compared
    )


def make_data(directory: Path) -> Path:
    directory.mkdir()
    generator = np.random.default_rng(0)
    for number in range(FILES):
        columns = {f"x{column}": generator.random(ROWS, dtype=np.float32) for column in range(COLUMNS)}
        pyarrow.parquet.write_table(
            pa.table(columns), directory / f"{number:02}.parquet", row_group_size=GROUP_ROWS, use_dictionary=False
        )
    return directory
