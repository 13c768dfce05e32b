"""A directory has the columns of all its files and of the names of its directories, as with pandas."""

# arguments: local
# campaign: ray; command; inprocess

import json
import sys
import tempfile
from pathlib import Path

import pandas as pd

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

RUNTIME = sys.argv[1]


def read(config):
    shard = drivetrain.get_dataset_shard("train")
    rows = [(row["x"], row["region"]) for row in shard.iter_rows()]
    Path(config["output"], str(drivetrain.get_context().get_world_rank())).write_text(json.dumps(rows))


def rows_of_workers(path):
    with tempfile.TemporaryDirectory() as output:
        DataParallelTrainer(
            read,
            train_loop_config={"output": output},
            datasets={"train": path},
            scaling_config=ScalingConfig(num_workers=1 if RUNTIME == "inprocess" else 2, runtime=RUNTIME),
            run_config=RunConfig(verbose=0),
        ).fit()
        return [tuple(row) for file in sorted(Path(output).iterdir()) for row in json.loads(file.read_text())]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        frame = pd.DataFrame({"x": range(12), "region": ["eu", "us"] * 6})
        frame.to_parquet(f"{directory}/hive", partition_cols=["region"])
        Path(directory, "files").mkdir()
        frame[["x"]].to_parquet(f"{directory}/files/0.parquet")
        frame.to_parquet(f"{directory}/files/1.parquet")

        hive = sorted(rows_of_workers(f"{directory}/hive"))
        files = rows_of_workers(f"{directory}/files")
        print(hive, files, sep="\n")
        rows = list(zip(frame["x"], frame["region"], strict=True))
        right = hive == rows and files == [(x, None) for x, _ in rows] + rows
        sys.exit(0 if right else 1)
