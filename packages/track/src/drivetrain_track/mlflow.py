"""What is reported as a run of MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import ConfigurationError
from drivetrain.plugin import Entry, Ranks, RunOutcome, TrackerCallback, numbers, outcome_of, parameters, redact

if TYPE_CHECKING:
    from drivetrain import CommittedCheckpoint, Run

__all__ = ["MLflowLoggerCallback"]

_RUN_TAG = "drivetrain.run_id"
_METRICS_AT_ONCE = 1000  # the REST API takes no more
_PARAMETERS_AT_ONCE = 100
_REFUSED = re.compile(r"[^\w\-. :/]")  # in names
_STATUS = {RunOutcome.FINISHED: "FINISHED", RunOutcome.INTERRUPTED: "KILLED", RunOutcome.FAILED: "FAILED"}


class MLflowLoggerCallback(TrackerCallback):
    """Logs a run to MLflow: a server, a database, or a directory.

    All attempts and resumes of a run are one run of MLflow, which has the tag ``drivetrain.run_id``. The train
    function's config becomes parameters, every number a metric whose step is the report's iteration; what MLflow
    refuses in names becomes ``_``. MLflow's own state in this process, such as its active run, stays as it is. A name
    and password of the server are read by MLflow from ``MLFLOW_TRACKING_USERNAME`` and ``MLFLOW_TRACKING_PASSWORD``, or
    ``MLFLOW_TRACKING_TOKEN``.

    Args:
        tracking_uri: where MLflow keeps runs; None for what MLflow is set to. One with credentials in it is not kept
            with the run: ``restore`` takes MLflow's setting then.
        registry_uri: where it keeps registered models; None for the same.
        experiment_name: the experiment, made where it is missing; None takes ``MLFLOW_EXPERIMENT_NAME``, or else the
            name of the run.
        tags: tags of the run of MLflow.
        save_artifact: store every committed checkpoint as an artifact, under its name.
        log_system_metrics: log CPU, memory, disk, network and GPUs of the driver's machine every 10 s, or as
            ``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL`` says.
        ranks: see :class:`~drivetrain.plugin.TrackerCallback`.
        drain_timeout_s: see there.

    Raises:
        PluginNotFoundError: ``mlflow`` is not installed.
        ConfigurationError: an argument is not one that it takes.
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
                raise ConfigurationError(f"MLflowLoggerCallback({name}=...): expected a URI, got {value!r}")
        if tags is not None and not isinstance(tags, Mapping):
            raise ConfigurationError(f"MLflowLoggerCallback(tags=...): expected a mapping, got {tags!r}")
        self.tracking_uri = tracking_uri
        self.registry_uri = registry_uri
        self.experiment_name = experiment_name
        self.tags = dict(tags or {})
        self.save_artifact = save_artifact
        self.log_system_metrics = log_system_metrics

    @property
    def wants_checkpoints(self) -> bool:
        """Whether checkpoints become artifacts."""
        return self.save_artifact

    def open(self, run: Run) -> int | None:
        """Finds the run of MLflow, or makes it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._monitor: Any = None
        self._client = client = MlflowClient(self.tracking_uri, self.registry_uri)
        name = self.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = client.search_runs([experiment_id], filter_string=f"tags.`{_RUN_TAG}` = '{run.id}'")
        last = 0
        if found:
            self._id = found[0].info.run_id
            last = int(found[0].data.metrics.get("training_iteration", 0))
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {**self.tags, _RUN_TAG: run.id}
            self._id = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
            parameter = [Param(_REFUSED.sub("_", key), str(value)) for key, value in parameters(run).items()]
            for start in range(0, len(parameter), _PARAMETERS_AT_ONCE):
                client.log_batch(self._id, params=parameter[start : start + _PARAMETERS_AT_ONCE])
        if self.log_system_metrics:
            from mlflow.system_metrics import system_metrics_monitor

            monitor: Any = system_metrics_monitor.SystemMetricsMonitor
            self._monitor = monitor(self._id, resume_logging=bool(found), tracking_uri=self.tracking_uri)
            self._monitor.start()
        return last

    def log(self, entries: Sequence[Entry]) -> None:
        """Logs numbers, many at a time."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_REFUSED.sub("_", name), value, round(entry.time * 1000), entry.iteration)
            for entry in entries
            for name, value in numbers(entry.metrics).items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def save(self, checkpoint: CommittedCheckpoint, directory: str) -> None:
        """Stores a checkpoint under its name."""
        self._client.log_artifacts(self._id, directory, artifact_path=checkpoint.name)

    def close(self, error: BaseException | None) -> None:
        """Marks the run of MLflow as finished, failed, or killed if it was interrupted."""
        if self._monitor is not None:
            self._monitor.finish()
        self._client.set_terminated(self._id, _STATUS[outcome_of(error)])

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses that have credentials in them."""
        state = super().__getstate__()
        for name in ("tracking_uri", "registry_uri"):
            if state[name] is not None and redact(state[name]) != state[name]:
                state[name] = None
        return state
