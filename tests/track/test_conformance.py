"""The conformance kit for trackers, applied to the trackers that store their data on this machine."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from drivetrain import Result
from drivetrain_track import MLflowLoggerCallback, TBXLoggerCallback, TrackerCallback
from drivetrain_track.testing import TrackerConformance
from tests.events import read_events

SECRET = "0123456789abcdef0123456789abcdef01234567"


class TestTensorBoard(TrackerConformance):
    def make_tracker(self, directory: Path) -> TrackerCallback:
        return TBXLoggerCallback()

    def read_metrics(self, directory: Path, result: Result) -> dict[str, list[tuple[int, Any]]]:
        events = read_events(Path(result.path))
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def read_status(self, directory: Path, result: Result) -> str:
        content = read_events(Path(result.path)).PluginTagToContent("hparams")["_hparams_/session_end_info"]
        status = HParamsPluginData.FromString(content).session_end_info.status
        return {1: "finished", 2: "failed"}.get(status, f"unknown {status}")


class TestMLflow(TrackerConformance):
    secret = SECRET
    database: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _database(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """An empty database, which each test copies, because creating one takes seconds."""
        from mlflow import MlflowClient

        database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
        MlflowClient(f"sqlite:///{database}").search_experiments()
        cls.database = database
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
            yield

    def make_tracker(self, directory: Path) -> TrackerCallback:
        directory.mkdir(exist_ok=True)
        if not (directory / "mlflow.db").exists():
            shutil.copy(self.database, directory / "mlflow.db")
        return MLflowLoggerCallback(
            f"sqlite:///{directory}/mlflow.db", experiment_name=directory.as_uri(), tags={"test": "conformance"}
        )

    def read_metrics(self, directory: Path, result: Result) -> dict[str, list[tuple[int, Any]]]:
        client, runs = self._runs(directory)
        points = defaultdict(list)
        for run in runs:
            for name in run.data.metrics:
                points[name] += [
                    (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
                ]
        return points

    def read_status(self, directory: Path, result: Result) -> str:
        (run,) = self._runs(directory)[1]
        return str(run.info.status).lower()

    def _runs(self, directory: Path) -> Any:
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
        experiment = client.get_experiment_by_name(directory.as_uri())
        return client, client.search_runs([experiment.experiment_id])
