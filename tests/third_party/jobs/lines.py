"""Reads a line file with three workers until rank 2 is killed, and then the rest of the epoch with two workers."""

import json
import os
import pathlib
import signal
import sys
import tempfile

from acme_lines import LineFile

import drivetrain
from drivetrain import Checkpoint, DataConfig, DataParallelTrainer, Result, RunConfig, ScalingConfig

arguments = json.loads(sys.argv[1])


def train() -> None:
    context, shard = drivetrain.get_context(), drivetrain.get_dataset_shard("train")
    rank = context.get_world_rank()
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        shard.load_state_dict(checkpoint.get_metadata()["data"])
    for step, batch in enumerate(shard.iter_batches(batch_size=4), 1):
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, f"ids_{rank}").write_text(json.dumps(batch["id"]))
            saved = Checkpoint.from_directory(directory)
            if rank == 0:
                saved.set_metadata({"data": shard.state_dict()})
            if context.get_world_size() == 3 and step == 3 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            drivetrain.report({"step": step}, saved)


def fit(workers: int) -> Result:
    return DataParallelTrainer(
        train,
        datasets={"train": LineFile(arguments["lines"])},
        scaling_config=ScalingConfig(num_workers=workers, runtime="local"),
        run_config=RunConfig(name="run", storage_path=arguments["storage_path"], verbose=0, resume="auto"),
    ).fit(raise_on_failure=False)


if __name__ == "__main__":
    assert fit(3).error is not None
    result = fit(2)
    read = [
        json.loads(file.read_text())
        for checkpoint, _ in result.best_checkpoints
        for file in pathlib.Path(checkpoint.path).glob("ids_*")
    ]
    print(json.dumps([number for ids in read for number in ids]))
    try:
        DataParallelTrainer(
            train,
            datasets={"train": LineFile(arguments["lines"])},
            dataset_config=DataConfig(keep_together={"train": "group"}),
        ).fit()
    except drivetrain.ConfigurationError as error:
        print(error)
