"""Logs reports to MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import ConfigurationError
from drivetrain.plugin.callbacks import RunOutcome, outcome_of, redact
from drivetrain_track._entries import Entry, Ranks
from drivetrain_track._tracker import TrackerCallback, numbers, parameters
from drivetrain_track.names import Names

if TYPE_CHECKING:
    from drivetrain.plugin import Failure, Run
    from drivetrain.plugin.callbacks import CommittedCheckpoint

__all__ = ["MLflowLoggerCallback"]

_RUN_TAG = "drivetrain.run_id"
_METRICS_PER_REQUEST = 1000  # limits of the REST API
_PARAMETERS_PER_REQUEST = 100
_INVALID_IN_NAMES = re.compile(r"[^\w\-. :/]")
_MAX_NAME_CHARS = 250
_STATUS = {RunOutcome.FINISHED: "FINISHED", RunOutcome.INTERRUPTED: "KILLED", RunOutcome.FAILED: "FAILED"}


class MLflowLoggerCallback(TrackerCallback):
    """Logs a run to MLflow: a server, a database, or a directory.

    All attempts and resumes of a run are logged to the same MLflow run. Its tag ``drivetrain.run_id`` is the id of the
    drivetrain run. The train function's config becomes parameters, and every number becomes a metric whose step is the
    report's iteration. Characters that MLflow does not allow in names become ``_``, and so do the parts of a path that
    it does not allow, as in ``val//loss``; names that become equal get a suffix. The state of MLflow in this
    process, such as its active run, does not change. MLflow reads the credentials for the server from
    ``MLFLOW_TRACKING_USERNAME`` and ``MLFLOW_TRACKING_PASSWORD``, or from ``MLFLOW_TRACKING_TOKEN``.

    Args:
        tracking_uri: the storage of runs; None for MLflow's setting. A URI with credentials is not stored with the
            run, so a trainer that :meth:`~drivetrain.DataParallelTrainer.restore` returns uses MLflow's setting.
        registry_uri: the storage of registered models; None for MLflow's setting, or else ``tracking_uri``.
        experiment_name: the experiment, which is created if it does not exist; None for ``MLFLOW_EXPERIMENT_NAME``, or
            else the name of the run.
        tags: tags of the MLflow run.
        save_artifact: store every committed checkpoint as an artifact with the checkpoint's name.
        log_system_metrics: log the usage of CPU, memory, disk, network and GPUs on the driver's machine every 10 s, or
            at the interval in ``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL``.
        ranks: see :class:`~drivetrain_track.TrackerCallback`.
        drain_timeout_s: see :class:`~drivetrain_track.TrackerCallback`.

    Raises:
        PluginNotFoundError: ``mlflow`` is not installed.
        ConfigurationError: an argument is invalid.
    """

    title: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        registry_uri: str | None = None,
        experiment_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        save_artifact: bool = False,
        log_system_metrics: bool = False,
        ranks: Ranks = "rank0",
        drain_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(ranks=ranks, drain_timeout_s=drain_timeout_s)
        for name, value in (("tracking_uri", tracking_uri), ("registry_uri", registry_uri)):
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(f"[DT-101] MLflowLoggerCallback({name}=...): expected a URI, got {value!r}")
        if tags is not None and not isinstance(tags, Mapping):
            raise ConfigurationError(f"[DT-101] MLflowLoggerCallback(tags=...): expected a mapping, got {tags!r}")
        self.tracking_uri = tracking_uri
        self.registry_uri = registry_uri
        self.experiment_name = experiment_name
        self.tags = dict(tags or {})
        self.save_artifact = save_artifact
        self.log_system_metrics = log_system_metrics

    @property
    def wants_checkpoints(self) -> bool:
        """True if checkpoints are stored as artifacts."""
        return self.save_artifact

    def open(self, run: Run) -> int | None:
        """Find the MLflow run, or create it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._monitor: Any = None
        self._names = Names(_clean, _MAX_NAME_CHARS)
        self._client = client = MlflowClient(self.tracking_uri, self.registry_uri)
        name = self.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        runs = client.search_runs([experiment_id], filter_string=f"tags.`{_RUN_TAG}` = '{run.id}'")
        last = 0
        if runs:
            self._id = runs[0].info.run_id
            last = int(runs[0].data.metrics.get("training_iteration", 0))
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {**self.tags, _RUN_TAG: run.id}
            self._id = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
            given = parameters(run)
            names = Names(_clean, _MAX_NAME_CHARS).of(given)
            parameter = [Param(names[key], str(value)) for key, value in given.items()]
            for start in range(0, len(parameter), _PARAMETERS_PER_REQUEST):
                client.log_batch(self._id, params=parameter[start : start + _PARAMETERS_PER_REQUEST])
        if self.log_system_metrics:
            from mlflow.system_metrics import system_metrics_monitor

            monitor: Any = system_metrics_monitor.SystemMetricsMonitor
            self._monitor = monitor(self._id, resume_logging=bool(runs), tracking_uri=self.tracking_uri)
            self._monitor.start()
        return last

    def log(self, entries: Sequence[Entry]) -> None:
        """Log the numbers in batches; the step is the report's iteration."""
        from mlflow.entities import Metric

        names = self._names.of(name for entry in entries for name in entry.metrics)
        metrics = [
            Metric(names[name], value, round(entry.time * 1000), entry.iteration)
            for entry in entries
            for name, value in numbers(entry.metrics).items()
        ]
        for start in range(0, len(metrics), _METRICS_PER_REQUEST):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS_PER_REQUEST])

    def save(self, checkpoint: CommittedCheckpoint, directory: str) -> None:
        """Store a checkpoint as an artifact with the checkpoint's name."""
        self._client.log_artifacts(self._id, directory, artifact_path=checkpoint.name)

    def log_failure(self, failure: Failure, retrying: bool) -> None:
        """Store the failure as a tag."""
        self._client.set_tag(self._id, f"drivetrain.failure.{failure.time:.0f}", failure.summary)

    def close(self, error: BaseException | None) -> None:
        """Mark the MLflow run as finished, as failed, or, if it was interrupted, as killed."""
        if self._monitor is not None:
            self._monitor.finish()
        self._client.set_terminated(self._id, _STATUS[outcome_of(error)])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without URIs that contain credentials."""
        state = super().__getstate__()
        for name in ("tracking_uri", "registry_uri"):
            if state[name] is not None and redact(state[name]) != state[name]:
                state[name] = None
        return state


def _clean(name: str) -> str:
    """Return a name that MLflow accepts: a path of allowed characters that has a single spelling."""
    parts = _INVALID_IN_NAMES.sub("_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
