"""Real trackers with a run that failed, was retried, and was resumed; and a real MLflow server."""

import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

import drivetrain
from drivetrain import (
    Callback,
    Checkpoint,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunCancelledError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain_track import (
    AimLoggerCallback,
    CometLoggerCallback,
    MLflowLoggerCallback,
    TBXLoggerCallback,
    WandbLoggerCallback,
)
from tests.events import read_events
from tests.support import DEADLINE_S, PROCESS_LIMIT_S, Pipe, free_port, release, send_line, wait_for_release

SECRET = "0123456789abcdef0123456789abcdef01234567"
STEPS = list(range(1, 8))


def train_with_failures(config: dict[str, Any]) -> None:
    """Commit step 3 and fail after step 5; commit step 6 and fail again, so that the run has to be resumed."""
    start = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "step.txt").read_text())
    for step in range(start + 1, STEPS[-1] + 1):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step.txt").write_text(str(step))
            drivetrain.report({"loss": 1 / step}, checkpoint=Checkpoint(directory) if step in (3, 6) else None)
        if (start, step) in ((0, 5), (3, 6)):
            raise ArithmeticError


def fit(
    storage: Path, *callbacks: Callback, train: Any = train_with_failures, workers: int = 1, **options: Any
) -> Result:
    settings = {"name": "run", "storage_path": storage, "callbacks": callbacks, "verbose": 0, **options}
    return DataParallelTrainer(
        train,
        train_loop_config={"lr": 0.1, "model": {"layers": 2}},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(**settings),
    ).fit()


def create_callbacks(directory: Path) -> list[Callback]:
    callbacks = [
        TBXLoggerCallback(),
        MLflowLoggerCallback(
            f"sqlite:///{directory}/mlflow.db",
            experiment_name="tests",
            save_artifact=True,
            drain_timeout_s=PROCESS_LIMIT_S,  # it creates the database
        ),
        WandbLoggerCallback("tests", api_key=SECRET, mode="offline", excludes=["time_this_iter_s"]),
        CometLoggerCallback(online=False, project_name="tests", log_env_details=False),  # details include the network
    ]
    if importlib.util.find_spec("aim") is not None:  # Aim is not available for every Python version
        callbacks.append(AimLoggerCallback(directory / "aim"))
    return callbacks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a run with all trackers: two attempts failed, then the run was restored from its directory."""
    directory = tmp_path_factory.mktemp("services")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("COMET_API_KEY", SECRET)
        patch.setenv("COMET_ERROR_TRACKING_ENABLE", "false")
        patch.setenv("COMET_INTERNAL_SENTRY_DSN", "")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
        with pytest.raises(TrainingFailedError):
            fit(directory, *create_callbacks(directory), failure_config=FailureConfig(max_failures=1))
        # The arguments of the trainer are stored with the run, except the API key.
        resumed = DataParallelTrainer.restore(directory / "run").fit()
    assert resumed.metrics["_training_iteration"] == STEPS[-1]
    return directory


@pytest.fixture
def run_id(directory: Path) -> str:
    run_id: str = json.loads((directory / "run" / "run.json").read_text())["id"]
    return run_id


def test_mlflow_has_one_run_with_each_step_once(directory: Path, run_id: str) -> None:
    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])

    assert (run.info.run_name, run.info.status, run.data.tags["drivetrain.run_id"]) == ("run", "FINISHED", run_id)
    assert run.data.params == {"lr": "0.1", "model/layers": "2", "num_workers": "1"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == STEPS
    failures = [text for tag, text in run.data.tags.items() if tag.startswith("drivetrain.failure.")]
    assert failures
    assert all("ArithmeticError" in text for text in failures)
    assert [metric.value for metric in history] == [1 / step for step in STEPS]
    saved = [file.path for file in client.list_artifacts(run.info.run_id)]
    assert saved == sorted(path.name for path in (directory / "run").glob("checkpoint_*"))
    assert "step.txt" in [Path(file.path).name for file in client.list_artifacts(run.info.run_id, saved[0])]


def test_tensorboard_has_each_step_once(directory: Path) -> None:
    events = read_events(directory / "run")
    assert [event.step for event in events.Scalars("loss")] == STEPS
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("failure")]
    assert len(texts) == 2
    assert all("ArithmeticError" in text for text in texts)


def test_wandb_has_one_directory_per_driver_named_by_the_run_id(directory: Path, run_id: str) -> None:
    runs = sorted((directory / "run" / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in runs] == [run_id, run_id]
    steps = [list(wandb_steps(path / f"run-{run_id}.wandb")) for path in runs]
    assert steps == [STEPS[:-1], STEPS[-1:]]


def test_wandb_has_the_reports_of_all_ranks_at_different_iterations(tmp_path: Path) -> None:
    gate = Pipe(tmp_path / "gate")
    path = gate.path

    def train(config: dict[str, Any]) -> None:
        rank = drivetrain.get_context().get_world_rank()
        if rank == 1:
            wait_for_release(path)
        for step in range(3):
            drivetrain.report({"loss": step})
        if rank == 0:
            release(path)

    result = fit(tmp_path, WandbLoggerCallback("tests", mode="offline", ranks="all"), train=train, workers=2)
    gate.close()

    (file,) = Path(result.path).glob("wandb/offline-run-*/run-*.wandb")
    history = list(wandb_history(file))
    for name in ("loss", "rank_1/loss"):
        assert [(values["training_iteration"], values[name]) for values in history if name in values] == [
            ("1", "0"),
            ("2", "1"),
            ("3", "2"),
        ]


def wandb_steps(file: Path) -> Iterator[int]:
    """Yield the steps with a loss, and check that excluded metrics are missing."""
    for values in wandb_history(file):
        assert "time_this_iter_s" not in values
        if "loss" in values:
            yield int(values["_step"])


def wandb_history(file: Path) -> Iterator[dict[str, str]]:
    """Yield the logged values, as JSON by name, from the file format of ``wandb sync``.

    A process of wandb writes the end of the file after the run has finished. The record of the exit comes last.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + DEADLINE_S
    records: list[Any] = []
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, f"{file} has no record of the exit"
        time.sleep(0.05)  # polled: wandb does not tell when its process has written the file
        records = [Record.FromString(data) for data in wandb_records(file.read_bytes())]
    for record in records:
        if record.HasField("history"):
            yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format after a header of 7 bytes."""
    block, header = 32768, struct.Struct("<IHB")
    offset, parts = 7, b""
    while offset + header.size <= len(data):
        if block - offset % block < header.size:
            offset += block - offset % block
            continue
        _, size, kind = header.unpack_from(data, offset)
        offset += header.size
        if offset + size > len(data):
            return  # this record is still being written
        parts += data[offset : offset + size]
        offset += size
        if kind in (1, 4):  # a complete record, or the last part of one
            yield parts
            parts = b""


def test_comet_has_one_archive_per_driver_for_the_same_experiment(directory: Path) -> None:
    archives = sorted((directory / "run" / "comet").rglob("*.zip"), key=lambda path: path.stat().st_mtime)
    messages = []
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            messages.append([json.loads(line) for line in archive.read("messages.json").splitlines()])
    steps = [
        [message["payload"]["metric"]["step"] for message in archived if is_loss(message)] for archived in messages
    ]
    assert steps == [STEPS[:-1], STEPS[-1:]]
    others = [message["payload"] for archived in messages for message in archived if is_failure(message)]
    assert len(others) == 2
    assert all("ArithmeticError" in other["value"] for other in others)
    keys = {path.name[:32] for path in archives}
    assert len(keys) == 1


def is_failure(message: dict[str, Any]) -> bool:
    return message["type"] == "log_other" and message["payload"]["key"].startswith("failure.")


def is_loss(message: dict[str, Any]) -> bool:
    return message["type"] == "metric_msg" and message["payload"]["metric"]["metricName"] == "loss"


def test_aim_has_one_run_with_each_step_once(directory: Path, run_id: str) -> None:
    aim = pytest.importorskip("aim")

    repo = aim.Repo.from_path(str(directory / "aim"))
    (run,) = [item.run for item in repo.query_runs(f"run.name == 'run {run_id}'", report_mode=0).iter_runs()]
    opened = aim.Run(run.hash, repo=repo, system_tracking_interval=None, capture_terminal_logs=False)
    (loss,) = [metric for metric in opened.metrics() if metric.name == "loss"]
    assert sorted(loss.values.values_list()) == sorted(1 / step for step in STEPS)
    assert all("ArithmeticError" in text for text in opened["failures"].values())
    opened.close()


def test_no_file_of_the_run_contains_credentials(directory: Path) -> None:
    files = [path for path in (directory / "run").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} >= {"run", "logs", "files"}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_address_with_a_password_is_not_stored_with_the_run(tmp_path: Path) -> None:
    def train() -> None:
        drivetrain.report({"step": 1})

    callback = MLflowLoggerCallback(f"http://me:{SECRET}@127.0.0.1:9", drain_timeout_s=0.1)
    result = fit(tmp_path, callback, train=train)

    assert SECRET.encode() not in Path(result.path, "trainer.pkl").read_bytes()
    assert SECRET not in Path(result.path, "run.json").read_text()


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of an MLflow server that stores runs in SQLite, and artifacts in its own directory."""
    directory = tmp_path_factory.mktemp("server")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{directory}/server.db", "--artifacts-destination", str(directory)]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *stores],
            stdout=log,
            stderr=log,
            cwd=directory,
            start_new_session=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
    try:
        deadline = time.monotonic() + 6 * DEADLINE_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                    assert response.status == 200
                break
            except OSError:
                assert server.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < deadline, (directory / "log").read_text()
                time.sleep(0.05)  # the server sends no notice when it is ready
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # also kills its workers; a graceful shutdown would take ten seconds
        server.wait(DEADLINE_S)


@pytest.mark.timeout(900)  # the server takes ten seconds to start on two idle cores
def test_mlflow_server_gets_parameters_metrics_artifacts_and_system_metrics(
    mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    pipe = tmp_path / "measured"
    os.mkfifo(pipe)
    pipe_path = str(pipe)

    class WaitsForMeasurement(Callback):
        """Releases the train function when MLflow has measured the machine."""

        def on_run_start(self, run: Any) -> None:
            self.has_measured = False

        def on_report(self, run: Any, report: Any) -> None:
            if report.iteration == 2:
                client = MlflowClient(mlflow_server)
                deadline = time.monotonic() + DEADLINE_S
                while not self.has_measured and time.monotonic() < deadline:
                    for experiment in client.search_experiments():
                        for tracked in client.search_runs([experiment.experiment_id]):
                            self.has_measured |= "system/cpu_utilization_percentage" in tracked.data.metrics
                Path(pipe_path).write_text("go")

    def train(config: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "model.txt").write_text("weights")
            drivetrain.report({"loss": 0.5}, checkpoint=Checkpoint(directory))
        drivetrain.report({"loss": 0.25})
        Path(pipe_path).read_text()

    mlflow = MLflowLoggerCallback(mlflow_server, tags={"team": "tests"}, save_artifact=True, log_system_metrics=True)
    fit(tmp_path, mlflow, WaitsForMeasurement(), train=train)

    client = MlflowClient(mlflow_server)
    experiment = client.get_experiment_by_name("run")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.1"
    assert run.data.tags["team"] == "tests"
    assert run.data.metrics["loss"] == 0.25
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    copy = client.download_artifacts(run.info.run_id, "checkpoint_000001", str(tmp_path))
    assert Path(copy, "model.txt").read_text() == "weights"


def test_mlflow_can_store_runs_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file://{tmp_path}/mlruns"

    def train(config: dict[str, Any]) -> None:
        drivetrain.report({"loss": 0.5, "top(5)": 0.9})

    fit(tmp_path, MLflowLoggerCallback(store, experiment_name="files"), train=train)

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("files").experiment_id])
    assert run.data.metrics["loss"] == 0.5
    assert run.data.metrics["top_5_"] == 0.9


@pytest.mark.parametrize(("ends_by", "status"), [("cancel", "KILLED"), ("error", "FAILED")])
def test_mlflow_has_the_same_outcome_as_the_run(ends_by: str, status: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    steps, gate = Pipe(tmp_path / "steps"), Pipe(tmp_path / "gate")
    steps_path, gate_path = steps.path, gate.path

    def train() -> None:
        drivetrain.report({"loss": 0.5})
        send_line(steps_path, "reported")
        wait_for_release(gate_path)
        if ends_by == "error":
            raise ArithmeticError

    tracker = MLflowLoggerCallback(store, experiment_name="outcome", drain_timeout_s=PROCESS_LIMIT_S)
    run = DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[tracker], verbose=0),
    ).start()
    steps.receive()
    if ends_by == "cancel":
        run.cancel()
    else:
        gate.release()
    with pytest.raises((RunCancelledError, TrainingFailedError)):
        run.result(PROCESS_LIMIT_S + DEADLINE_S)

    client = MlflowClient(store)
    (tracked,) = client.search_runs([client.get_experiment_by_name("outcome").experiment_id])
    assert tracked.info.status == status


def test_unresponsive_server_does_not_delay_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train(config: dict[str, Any]) -> None:
        for step in range(100):
            drivetrain.report({"step": step})

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        result = fit(tmp_path, MLflowLoggerCallback(address, drain_timeout_s=0.5), train=train)
        assert time.monotonic() - started < DEADLINE_S / 2

    assert len(result.metrics_dataframe) == 100
    assert "run: mlflow: not finished 0.5 s after the end of the run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: MLflowLoggerCallback(tags=["a"]), "expected a mapping"),
        (lambda: MLflowLoggerCallback(3), "expected a URI"),
        (lambda: WandbLoggerCallback(api_key="x", api_key_file="y"), "Set one of them"),
        (lambda: WandbLoggerCallback(api_key_file="/nowhere/key"), "got /nowhere/key, which does not exist"),
        (lambda: WandbLoggerCallback(excludes="loss"), "expected a list of names"),
        (lambda: WandbLoggerCallback(id="x"), "wandb.init that the callback sets itself, got id"),
        (lambda: CometLoggerCallback(tags="a"), "expected a list of tags"),
        (lambda: CometLoggerCallback(api_key="x"), "Set COMET_API_KEY"),
        (lambda: TBXLoggerCallback(artifacts="yes"), "expected True or False"),
    ],
)
def test_invalid_arguments_are_rejected_when_the_callback_is_created(create: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create()
