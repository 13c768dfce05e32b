"""A value or name that a service refuses costs only that value, with one warning; names stay distinct."""
# campaign:

import math
import os
import subprocess
import sys
from pathlib import Path

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_track import MLflowLoggerCallback, TBXLoggerCallback

NAMES = ("val//acc", "a?b", "a*b", "a_b", "/lead", "..", "x" * 300, "x" * 299 + "y")
STEPS = 6


def train_func() -> None:
    for step in range(1, STEPS + 1):
        odd = {name: float(number) for number, name in enumerate(NAMES)}
        drivetrain.report({"loss": 1 / step, **odd, **({"huge": 10**400, "nan": math.nan} if step == 3 else {})})


def main(database: str) -> None:
    DataParallelTrainer(
        train_func,
        train_loop_config={"a?b": 1, "a*b": 2, "c//d": 3, "long": "x" * 9000, "huge": 10**400},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            verbose=0,
            name="run",
            callbacks=[MLflowLoggerCallback(database, experiment_name="e"), TBXLoggerCallback()],
        ),
    ).fit()


if __name__ == "__main__":
    database = f"sqlite:///{Path.cwd()}/mlflow.db"
    if len(sys.argv) > 1:
        main(database)
        sys.exit()
    done = subprocess.run([sys.executable, __file__, "run"], capture_output=True, text=True, check=True)
    warnings = {
        title: [line for line in done.stderr.splitlines() if f"run: {title}: " in line and "waiting" not in line]
        for title in ("mlflow", "tensorboard")
    }
    print(warnings)
    right = all(len(lines) == 1 and "'huge'" in lines[0] for lines in warnings.values())

    from mlflow import MlflowClient

    client = MlflowClient(database)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    history = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
    values = {value for name, value in run.data.metrics.items() if name not in ("loss", "time_this_iter_s")}
    print(history, values, len(run.data.params))
    right = right and history == list(range(1, STEPS + 1)) and values.issuperset(map(float, range(len(NAMES))))
    right = right and {"1", "2", "3"} <= set(run.data.params.values()) and run.data.metrics["a_b"] == 3.0

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(os.path.join(os.environ["DRIVETRAIN_STORAGE_PATH"], "run"))
    events.Reload()
    written = {name: [event.step for event in events.Scalars(name)] for name in ("loss", *NAMES)}
    print(written)
    sys.exit(not (right and all(steps == history for steps in written.values())))
