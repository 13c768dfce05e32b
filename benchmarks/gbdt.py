"""XGBoost and LightGBM on 1,000,000 rows x 50 float32 columns, 100 rounds, 1 and 2 workers, compared with other ways.

One thread per worker. Training time is the time of the rounds only; the data are read before. Memory is the peak of a
worker's own memory minus its memory after the start, divided by its part of the data as float32. Weak scaling: 2
workers on 2,000,000 rows, divided by 1 worker on half of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, Run, quantity

PAIRS = 3
ALONE = "custom script"
RAY_TRAIN = "Ray Train"
ROWS, COLUMNS = 1_000_000, 50
LIMIT_S = 600.0


def measure(bench: Bench) -> Iterator[Quantity]:
    once = make_data(bench.directory / "rows.parquet", ROWS)
    for workers in (1, 2):
        runs = _runs(bench, "xgboost", once, ROWS, workers)
        yield from _compare("XGBoost", workers, runs)
        if workers == 1:
            one = runs
    twice = make_data(bench.directory / "twice.parquet", 2 * ROWS)
    yield _weak_scaling("XGBoost", one, _runs(bench, "xgboost", twice, 2 * ROWS, 2, peer=False))
    for workers in (1, 2):
        runs = _runs(bench, "lightgbm", once, ROWS, workers)
        yield from _compare("LightGBM", workers, runs)
        if workers == 1:
            one = runs
    yield _weak_scaling("LightGBM", one, _runs(bench, "lightgbm", twice, 2 * ROWS, 2))


def make_data(path: Path, rows: int) -> Path:
    generator = np.random.default_rng(0)
    features = generator.random((COLUMNS, rows), dtype=np.float32)
    noise = generator.random(rows, dtype=np.float32)
    label = (features[0] + features[1] * features[2] + 0.5 * noise > 1).astype(np.float32)
    columns = {f"x{number}": column for number, column in enumerate(features)}
    pyarrow.parquet.write_table(pa.table({**columns, "label": label}), path, row_group_size=50_000)
    return path


def _runs(
    bench: Bench, library: str, data: Path, rows: int, workers: int, *, peer: bool = True
) -> dict[str, list[Run]]:
    arguments = {"data": data, "workers": workers, "shard_bytes": rows * (COLUMNS + 1) * 4 // workers}
    alone = {"xgboost": "gbdt_alone.py", "lightgbm": "gbdt_alone_lightgbm.py"}[library]
    jobs = {
        OURS: Job(script="gbdt_drivetrain.py", arguments={**arguments, "library": library}, limit_s=LIMIT_S),
        ALONE: Job(script=alone, arguments=arguments, limit_s=LIMIT_S),
    }
    if library == "xgboost" and peer:
        jobs[RAY_TRAIN] = Job(script="gbdt_raytrain.py", arguments=arguments, limit_s=LIMIT_S)
    return bench.alternate(jobs)


def _training(run: Run) -> float:
    return run.last("trained") - run.last("training")


def _compare(library: str, workers: int, runs: Mapping[str, Sequence[Run]]) -> Iterator[Quantity]:
    which = f"{library}, {workers} worker{'s' * (workers > 1)}"
    yield quantity(f"training, {which}", "s", runs, _training, Goal(bound=1.02, of=ALONE))
    yield quantity(f"start of the job -> training, {which}", "s", runs, lambda run: run.last("training") - run.started)
    weighed = {side: found for side, found in runs.items() if side != RAY_TRAIN}
    goals = (Goal(bound=1.6),) if library == "XGBoost" else ()
    yield quantity(
        *(f"peak memory, {which}", "shards", weighed, lambda run: run.mean("weighed", "shards")),
        *goals,
        compared=[(OURS, ALONE)],
    )


def _weak_scaling(library: str, one: Mapping[str, Sequence[Run]], two: Mapping[str, Sequence[Run]]) -> Quantity:
    values = {
        side: [
            None if first.error or second.error else _training(second) / _training(first)
            for first, second in zip(one[side], two[side], strict=True)
        ]
        for side in two
    }
    return Quantity(
        name=f"weak scaling, {library}",
        unit="x",
        values=values,
        compared=[(OURS, ALONE)],
        goals=[Goal(bound=1.1)],
    )
