"""XGBoost on 1,000,000 rows x 50 float32 columns, 100 rounds, 1 and 2 workers, beside a script without drivetrain.

One thread a worker. Training time is that of ``xgboost.train`` alone; the data are read before. Memory is the peak of a
worker's own over what it was when it was up, in units of its part of the data as float32.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, quantity

PAIRS = 3
ALONE = "script of one's own"
ROWS, COLUMNS = 1_000_000, 50


def measure(bench: Bench) -> Iterator[Quantity]:
    data = make_data(bench.directory / "rows.parquet")
    for workers in (1, 2):
        arguments = {"data": data, "workers": workers, "shard_bytes": ROWS * (COLUMNS + 1) * 4 // workers}
        runs = bench.alternate(
            {
                OURS: Job(script="gbdt_drivetrain.py", arguments=arguments),
                ALONE: Job(script="gbdt_alone.py", arguments=arguments),
            }
        )
        for name, first, last, goal in (
            ("training", "training", "trained", (Goal(bound=1.02, of=ALONE),)),
            ("start of the job -> training", "", "training", ()),
        ):
            yield quantity(
                *(f"{name}, {workers} workers", "s", runs),
                lambda run, first=first, last=last: run.last(last) - (run.last(first) if first else run.started),
                *goal,
                compared=[(OURS, ALONE)],
            )
        yield quantity(
            *(f"peak memory, {workers} workers", "shards", runs, lambda run: run.mean("weighed", "shards")),
            Goal(bound=1.6),
            compared=[(OURS, ALONE)],
        )


def make_data(path: Path) -> Path:
    generator = np.random.default_rng(0)
    features = generator.random((COLUMNS, ROWS), dtype=np.float32)
    noise = generator.random(ROWS, dtype=np.float32)
    label = (features[0] + features[1] * features[2] + 0.5 * noise > 1).astype(np.float32)
    columns = {f"x{number}": column for number, column in enumerate(features)}
    pyarrow.parquet.write_table(pa.table({**columns, "label": label}), path, row_group_size=50_000)
    return path
