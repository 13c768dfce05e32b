"""Ranks that report 20 metrics at a constant rate for a long time, on S3; rank 0 commits a checkpoint every minute."""

import random
import statistics
import tempfile
import time
from pathlib import Path

import s3fs
from counting import CountingS3
from stamps import options, stamp

import drivetrain
import drivetrain.runs
from drivetrain import Callback, Checkpoint, CheckpointConfig, DataParallelTrainer, RunConfig, ScalingConfig

METRICS = 20


class DriverMemory(Callback):
    """Stamps the memory of the driver after each commit."""

    def on_checkpoint(self, run, checkpoint):
        status = Path("/proc/self/status").read_text()
        stamp(config, "memory", mb=int(status.partition("VmRSS:")[2].split()[0]) / 1000)


def train_func(config):
    began, interval = time.monotonic(), 1 / config["rate"]
    microseconds, commits = [], 0
    step = 0
    while time.monotonic() - began < 60 * config["minutes"]:
        time.sleep(max(0.0, began + step * interval - time.monotonic()))
        metrics = {f"metric_{number}": random.random() for number in range(METRICS)}
        is_commit = time.monotonic() - began >= config["commit_s"] * (commits + 1)
        before = time.perf_counter()
        if is_commit and drivetrain.get_context().get_world_rank() == 0:
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "weights").write_bytes(bytes(10_000))
                drivetrain.report(metrics, Checkpoint.from_directory(directory), wait=True, checkpoint_ranks=[0])
            stamp(config, "commit", s=time.perf_counter() - before, reports=step)
        else:
            drivetrain.report(metrics)
            microseconds.append(1e6 * (time.perf_counter() - before))
        step += 1
        if is_commit:
            commits += 1
            stamp(config, "minute", mean_us=statistics.fmean(microseconds), max_us=max(microseconds))
            microseconds.clear()


if __name__ == "__main__":
    config = options(workers=8, minutes=10.0, rate=16.0, commit_s=60.0, bucket="bucket")
    filesystem = CountingS3()
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["workers"], resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(
            name="soak",
            storage_path=config["bucket"],
            storage_filesystem=filesystem,
            callbacks=[DriverMemory()],
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    storage = drivetrain.runs.open_run(result.path, storage_filesystem=s3fs.S3FileSystem()).storage
    names = [f"result_rank_{rank}.json" for rank in range(1, config["workers"])]
    names += ["result.json", "progress.csv", "timeline.jsonl", "usage.jsonl"]
    size = sum(len(storage.read_bytes(name) or b"") for name in names)
    stamp(config, "uploaded", uploaded=filesystem.uploaded, size=size, ratio=filesystem.uploaded / size)
