"""Logs reports to Comet."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import ConfigurationError
from drivetrain_track._entries import Entry, Ranks
from drivetrain_track._tracker import TrackerCallback, numbers, parameters
from drivetrain_track.names import Names

if TYPE_CHECKING:
    from drivetrain.plugin import Failure, Run
    from drivetrain.plugin.callbacks import CommittedCheckpoint

__all__ = ["CometLoggerCallback"]

_DIRECTORY = "comet"
_MAX_NAME_CHARS = 100  # Comet cuts longer names
_NO_AUTO_LOGGING: dict[str, Any] = {
    # Comet's automatic logging would record data of the driver, which does not train.
    "auto_metric_logging": False,
    "auto_param_logging": False,
    "auto_output_logging": False,
    "parse_args": False,
    "log_graph": False,
    "log_code": False,
    "display_summary_level": 0,
}


class CometLoggerCallback(TrackerCallback):
    """Logs a run to Comet, or to archives in the run directory, which ``comet upload`` can upload later.

    All attempts and resumes of a run are logged to the same experiment, whose key is derived from the run's name and
    id. ``comet_ml`` reads the API key from ``COMET_API_KEY`` or from its configuration file.

    Args:
        online: True sends the reports to Comet. False writes an archive for each start of the run, to ``comet/`` in the
            run directory.
        tags: tags of the experiment.
        save_checkpoints: store every committed checkpoint as a model with the checkpoint's name.
        ranks: see :class:`~drivetrain_track.TrackerCallback`.
        drain_timeout_s: see :class:`~drivetrain_track.TrackerCallback`.
        **experiment: ``workspace``, ``project_name``, and other arguments of ``comet_ml.ExperimentConfig``.

    Raises:
        PluginNotFoundError: ``comet_ml`` is not installed.
        ConfigurationError: an argument is invalid.
    """

    title: ClassVar[str] = "comet"
    package: ClassVar[str] = "comet_ml"
    extra: ClassVar[str] = "comet"

    def __init__(
        self,
        online: bool = True,
        tags: Sequence[str] = (),
        *,
        save_checkpoints: bool = False,
        ranks: Ranks = "rank0",
        drain_timeout_s: float = 60.0,
        **experiment: Any,
    ) -> None:
        super().__init__(ranks=ranks, drain_timeout_s=drain_timeout_s)
        if isinstance(tags, str):
            raise ConfigurationError(f"[DT-101] CometLoggerCallback(tags=...): expected a list of tags, got {tags!r}")
        if "api_key" in experiment:
            raise ConfigurationError(
                "[DT-101] CometLoggerCallback(api_key=...): expected the API key in the environment, got an argument. "
                "Set COMET_API_KEY"
            )
        self.online = online
        self.tags = tuple(tags)
        self.save_checkpoints = save_checkpoints
        self.experiment = experiment

    @property
    def wants_checkpoints(self) -> bool:
        """True if checkpoints are stored as models."""
        return self.save_checkpoints

    def open(self, run: Run) -> None:
        """Start the experiment, or continue it."""
        import comet_ml

        location = {name: self.experiment.get(name) for name in ("workspace", "project_name")}
        options = {name: value for name, value in self.experiment.items() if name not in location}
        # Each start has its own directory, because all archives of a run are named after the same experiment key.
        directory = run.path / _DIRECTORY / time.strftime("%Y-%m-%d_%H-%M-%S")
        directory.mkdir(parents=True, exist_ok=True)
        self._session = comet_ml.start(
            **location,
            experiment_key=hashlib.md5(f"{run.name} {run.id}".encode(), usedforsecurity=False).hexdigest(),
            online=self.online,
            mode="get_or_create",
            experiment_config=comet_ml.ExperimentConfig(
                **{"name": run.name, **_NO_AUTO_LOGGING, **options},
                tags=list(self.tags),
                offline_directory=str(directory),
            ),
        )
        self._names = Names(_clean, _MAX_NAME_CHARS)
        given = parameters(run)
        names = Names(_clean, _MAX_NAME_CHARS).of(given)
        self._session.log_parameters({names[name]: value for name, value in given.items()})

    def log(self, entries: Sequence[Entry]) -> None:
        """Log the numbers; the step is the report's iteration."""
        for iteration, values in [(entry.iteration, numbers(entry.metrics)) for entry in entries]:
            names = self._names.of(values)
            self._session.log_metrics({names[name]: value for name, value in values.items()}, step=iteration)

    def save(self, checkpoint: CommittedCheckpoint, directory: str) -> None:
        """Store a checkpoint as a model with the checkpoint's name."""
        self._session.log_model(checkpoint.name, directory)

    def log_failure(self, failure: Failure, retrying: bool) -> None:
        """Store the failure among the other values of the experiment."""
        self._session.log_other(f"failure.{failure.time:.0f}", failure.summary)

    def close(self, error: BaseException | None) -> None:
        """Wait until all data has been sent or archived, and end the experiment."""
        self._session.end()


def _clean(name: str) -> str:
    return name or "_"  # Comet drops values without a name
