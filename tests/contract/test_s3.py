"""The run directory in a bucket: the same scenario on every runtime, against a real S3 server."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunInUseError,
    SyncConfig,
    TrainingFailedError,
)
from drivetrain._storage.directory import Storage
from drivetrain._storage.manifest import read_manifest
from drivetrain._storage.remote import locate
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import once_on_ray, same_on_ray
from tests.s3 import FaultProxy, S3Server, SlowDown
from tests.support import Pipe


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket("bucket")
        yield server


class Bucket:
    """A directory of a bucket for one test, as a filesystem object that takes its credentials to the workers."""

    def __init__(self, server: S3Server, proxy: FaultProxy, name: str) -> None:
        from pyarrow.fs import S3FileSystem

        self.proxy = proxy
        self.path = f"bucket/{name}"
        self.uri = proxy.uri(self.path)
        self.filesystem = S3FileSystem(
            access_key=server.access_key,
            secret_key=server.secret_key,
            endpoint_override=proxy.endpoint,
            region="us-east-1",
            allow_delayed_open=True,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"storage_path": self.path, "storage_filesystem": self.filesystem}

    @property
    def run(self) -> Storage:
        return Storage(*locate(f"{self.path}/run", self.filesystem, what="test"))


@pytest.fixture
def bucket(server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with FaultProxy(server, markers=True) as proxy:
        yield Bucket(server, proxy, f"{abs(hash(request.node.nodeid)):x}")


def train(config: dict) -> int:
    """Add up steps; each rank keeps its state in its own file, and leaves an artifact."""
    context = drivetrain.get_context()
    rank = context.get_world_rank()
    total, start = 0, 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            start, total = json.loads(Path(path, f"rank_{rank}.json").read_text())
    for step in range(start, config["steps"]):
        total += (step + 1) * (rank + 1)
        if context.attempt == 0 and step == config.get("fail_at"):
            raise RuntimeError("in the middle")
        Path(context.get_trial_dir(), f"notes_{rank}.txt").write_text(f"step {step}")
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank_{rank}.json").write_text(json.dumps([step + 1, total]))
            Path(directory, "shared.txt").write_text("the same from all ranks")
            drivetrain.report(
                {"step": step, "total": total},
                checkpoint=Checkpoint.from_directory(directory),
                checkpoint_upload_mode=config.get("mode", "sync"),
            )
    return total


@pytest.mark.parametrize("mode", once_on_ray("async", "sync"))
def test_run_in_a_bucket_fails_retries_and_keeps_all_files_in_the_bucket(
    runtime: RuntimeUnderTest, bucket: Bucket, mode: str
) -> None:
    bucket.proxy.inject(SlowDown(), times=3, method="PUT", containing="checkpoint_")
    result = runtime.fit(
        train,
        {"steps": 5, "fail_at": 3, "mode": mode},
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
        sync_config=SyncConfig(sync_artifacts=True),
        **bucket.options,
    )

    assert result.return_value == 15
    assert result.path == f"{bucket.path}/run"
    assert result.filesystem == bucket.filesystem
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [3, 4]
    assert result.checkpoint is not None
    result.checkpoint.verify()
    with result.checkpoint.as_directory() as path:
        assert json.loads(Path(path, "rank_0.json").read_text()) == [5, 15]
    reread = Result.from_path(f"{bucket.path}/run", bucket.filesystem)
    assert reread.metrics == result.metrics
    assert reread.checkpoint == result.checkpoint
    assert list(reread.metrics_dataframe["_training_iteration"]) == [1, 2, 3, 4, 5]
    files = bucket.run.walk("")
    checkpoints = {name.partition("/")[0] for name in files if name.startswith("checkpoint_")}
    assert checkpoints == {Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints}
    for rank in range(runtime.world()):
        assert bucket.run.read_bytes(f"artifacts/notes_{rank}.txt") == b"step 4"
    assert {"run.json", "manifest.json", "trainer.pkl", "result.json", "progress.csv"} <= files.keys()
    assert ".lock" not in files


@same_on_ray
def test_run_in_a_bucket_is_restored_by_its_uri(runtime: RuntimeUnderTest, bucket: Bucket) -> None:
    with pytest.raises(TrainingFailedError):
        runtime.fit(train, {"steps": 4, "fail_at": 2}, **bucket.options)
    path = f"{bucket.path}/run"
    trainer_class = drivetrain.DataParallelTrainer
    assert trainer_class.can_restore(path, bucket.filesystem)
    assert not trainer_class.can_restore(f"{bucket.path}/nothing", bucket.filesystem)

    trainer = trainer_class.restore(path, storage_filesystem=bucket.filesystem, train_loop_config={"steps": 6})
    result = trainer.fit()

    assert result.return_value == 21
    assert list(result.metrics_dataframe["step"]) == [0, 1, 2, 3, 4, 5]


def store_in_bucket(checkpoint: Checkpoint, name: str) -> Checkpoint:
    context = drivetrain.get_context()
    filesystem, path = context.get_run_filesystem(), f"{context.get_run_dir()}/{name}"
    with checkpoint.as_directory() as directory:
        for file in Path(directory).iterdir():
            with filesystem.open_output_stream(f"{path}/{file.name}") as stream:
                stream.write(file.read_bytes().upper())
    return Checkpoint(path, filesystem)


def train_storing_files_itself(config: dict) -> None:
    """The function stores the files itself: as the upload function, or before the report."""
    rank = drivetrain.get_context().get_world_rank()
    for step in range(3):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"{rank}.txt").write_text(f"step {step}")
            checkpoint = Checkpoint.from_directory(directory)
            if config["mode"] == "none":
                stored = store_in_bucket(checkpoint, f"own_{step}")
                drivetrain.report({"step": step}, stored, checkpoint_upload_mode="none")
            else:
                drivetrain.report({"step": step}, checkpoint, checkpoint_upload_fn=store_in_bucket)


@same_on_ray
@pytest.mark.parametrize("mode", ["none", "function"])
def test_train_function_can_store_its_checkpoints_in_the_bucket_itself(
    runtime: RuntimeUnderTest, bucket: Bucket, mode: str
) -> None:
    result = runtime.fit(
        train_storing_files_itself,
        {"mode": mode},
        checkpoint_config=CheckpointConfig(num_to_keep=2),
        **bucket.options,
    )

    assert result.checkpoint is not None
    result.checkpoint.verify()
    names = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert names == (["own_1", "own_2"] if mode == "none" else ["checkpoint_000002", "checkpoint_000003"])
    with result.checkpoint.as_directory() as directory:
        found = {file.name: file.read_text() for file in Path(directory).glob("*.txt")}
    assert found == {f"{rank}.txt": "STEP 2" for rank in range(runtime.world())}
    assert not [name for name in bucket.run.walk("") if name.startswith(("own_0", "checkpoint_000001"))]


KILLED_DRIVER = """
import json, os, sys
import drivetrain
from tests.contract.test_s3 import train
from tests.support import send_line
given = json.loads(sys.argv[1])

class NotifyCommits(drivetrain.Callback):
    def on_checkpoint(self, run, checkpoint):
        send_line(given["pipe"], checkpoint.number)

trainer = drivetrain.DataParallelTrainer(
    train,
    train_loop_config={"steps": given["steps"]},
    scaling_config=drivetrain.ScalingConfig(num_workers=given["num_workers"], runtime=given["runtime"]),
    run_config=drivetrain.RunConfig(
        name="run", storage_path=given["uri"], resume="auto", verbose=1, callbacks=[NotifyCommits()],
        sync_config=drivetrain.SyncConfig(sync_period=0.1),
    ),
)
print(trainer.fit().return_value)
"""


@pytest.mark.parametrize("runtime", ["inprocess", "local"], indirect=True)
def test_driver_killed_with_all_workers_resumes_from_the_bucket_and_a_concurrent_driver_is_refused(
    runtime: RuntimeUnderTest, bucket: Bucket, pipe: Pipe
) -> None:
    arguments = {"uri": bucket.uri, "pipe": pipe.path}
    first = runtime.start_driver(KILLED_DRIVER, {**arguments, "steps": 10_000})
    pipe.receive(3)
    with pytest.raises(RunInUseError, match=f"process {first.process.pid} on"):
        runtime.fit(train, {"steps": 1}, storage_path=bucket.uri, resume="auto")
    for pid in [*first.offspring(), first.process.pid]:
        with contextlib.suppress(ProcessLookupError):  # workers exit with their parent
            os.kill(pid, 9)
    first.wait()
    latest = read_manifest(bucket.run)[-1].number

    second = runtime.start_driver(KILLED_DRIVER, {**arguments, "steps": latest + 2})
    code, output, errors = second.wait()

    assert code == 0, errors
    assert int(output.splitlines()[-1]) == sum(range(1, latest + 3))
    continued = re.search(r"continues from checkpoint_(\d+)", errors)
    assert continued is not None
    # The bucket may have received the last request of the killed driver after the test read the manifest.
    assert int(continued[1]) in (latest, latest + 1)
    result = Result.from_path(f"{bucket.path}/run", bucket.filesystem)
    assert list(result.metrics_dataframe["_training_iteration"]) == list(range(1, latest + 3))
