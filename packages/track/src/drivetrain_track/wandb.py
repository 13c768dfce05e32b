"""Logs reports to Weights & Biases."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import ConfigurationError
from drivetrain_track._entries import Entry, Ranks
from drivetrain_track._tracker import TrackerCallback, parameters

if TYPE_CHECKING:
    import os

    from drivetrain.plugin import Failure, Run
    from drivetrain.plugin.callbacks import CommittedCheckpoint

__all__ = ["WandbLoggerCallback"]


class WandbLoggerCallback(TrackerCallback):
    """Logs a run to Weights & Biases, online or to a subdirectory of the run directory (``WANDB_MODE=offline``).

    All attempts and resumes of a run are logged to the same Weights & Biases run, which has the id of the drivetrain
    run. The history of a Weights & Biases run can only grow: if a resumed run repeats an iteration, the first values
    are kept. The driver's terminal output is not recorded. ``wandb`` reads the API key from ``WANDB_API_KEY`` or from
    the configuration that ``wandb login`` writes; an ``api_key`` argument is kept only in memory.

    Args:
        project: the project; None for ``WANDB_PROJECT`` or the service's default.
        group: the group of runs; None for ``WANDB_RUN_GROUP``.
        api_key: the API key. It is not stored with the run, so a trainer that
            :meth:`~drivetrain.DataParallelTrainer.restore` returns requires the key in the environment.
        api_key_file: a file that contains the API key.
        excludes: metrics that are not logged.
        log_config: log the train function's config.
        upload_checkpoints: store every committed checkpoint as a version of the artifact ``checkpoint_<run id>``.
        ranks: see :class:`~drivetrain_track.TrackerCallback`.
        drain_timeout_s: see :class:`~drivetrain_track.TrackerCallback`.
        **init: other arguments of ``wandb.init``, such as ``entity`` or ``tags``.

    Raises:
        PluginNotFoundError: ``wandb`` is not installed.
        ConfigurationError: an argument is invalid.
    """

    title: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        *,
        api_key: str | None = None,
        api_key_file: str | os.PathLike[str] | None = None,
        excludes: Sequence[str] = (),
        log_config: bool = True,
        upload_checkpoints: bool = False,
        ranks: Ranks = "rank0",
        drain_timeout_s: float = 60.0,
        **init: Any,
    ) -> None:
        super().__init__(ranks=ranks, drain_timeout_s=drain_timeout_s)
        if api_key is not None and api_key_file is not None:
            raise ConfigurationError(
                "[DT-102] WandbLoggerCallback: expected api_key or api_key_file, got both. Set one of them"
            )
        if api_key_file is not None and not Path(api_key_file).expanduser().is_file():
            raise ConfigurationError(
                f"[DT-101] WandbLoggerCallback(api_key_file=...): expected a file with the API key, got "
                f"{api_key_file}, which does not exist or is not a file"
            )
        if isinstance(excludes, str):
            raise ConfigurationError(
                f"[DT-101] WandbLoggerCallback(excludes=...): expected a list of names, got {excludes!r}"
            )
        if reserved := init.keys() & {"id", "resume", "dir", "config", "reinit"}:
            raise ConfigurationError(
                "[DT-102] WandbLoggerCallback: expected no arguments of wandb.init that the callback sets itself, got "
                f"{', '.join(sorted(reserved))}. Remove them"
            )
        self.project = project
        self.group = group
        self.api_key_file = api_key_file
        self.excludes = frozenset(excludes)
        self.log_config = log_config
        self.upload_checkpoints = upload_checkpoints
        self.init = init
        self._api_key = api_key

    @property
    def wants_checkpoints(self) -> bool:
        """True if checkpoints are stored as artifacts."""
        return self.upload_checkpoints

    def open(self, run: Run) -> int | None:
        """Start the Weights & Biases run, or continue it."""
        import wandb

        init = dict(self.init)
        custom: Mapping[str, Any] | wandb.Settings = init.pop("settings", None) or {}
        settings = copy.copy(custom) if isinstance(custom, wandb.Settings) else wandb.Settings(**custom)
        # wandb would replace the driver's output streams to record them; the workers' output is in logs/ anyway.
        settings.console = "off"
        settings.silent = True
        if (key := self._find_key()) is not None:
            settings.api_key = key
        self._run_id = run.id
        self._session = wandb.init(
            project=self.project,
            group=self.group,
            id=run.id,
            dir=run.path,
            config=parameters(run) if self.log_config else None,
            reinit="create_new",  # does not affect a run that the user's code has open
            settings=settings,
            **{"name": run.name, **init, **({} if _is_offline(settings, init) else {"resume": "allow"})},
        )
        if self.ranks == "all":
            self._session.define_metric("*", step_metric="training_iteration")
        summary: Any = self._session.summary
        return int(summary.get("training_iteration", 0))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without an API key in the settings."""
        state = super().__getstate__()
        settings = self.init.get("settings")
        if isinstance(settings, Mapping):
            settings = {name: value for name, value in settings.items() if name != "api_key"}
        elif settings is not None:
            settings = copy.copy(settings)
            settings.api_key = None
        state["init"] = {**self.init, "settings": settings}
        return state

    def log(self, entries: Sequence[Entry]) -> None:
        """Log all values. The iteration is the step, but with ``ranks="all"``, it is logged as a metric instead."""
        for entry in entries:
            values = {name: value for name, value in entry.metrics.items() if name not in self.excludes}
            if self.ranks == "all":  # ranks report at different times, and wandb's step can only increase
                self._session.log({**values, "training_iteration": entry.iteration})
            else:
                self._session.log(values, step=entry.iteration)

    def save(self, checkpoint: CommittedCheckpoint, directory: str) -> None:
        """Store a checkpoint as a version of the artifact ``checkpoint_<run id>``."""
        import wandb

        artifact = wandb.Artifact(f"checkpoint_{self._run_id}", "model", metadata=dict(checkpoint.metrics))
        artifact.add_dir(directory)
        self._session.log_artifact(artifact, aliases=["latest", checkpoint.name])

    def log_failure(self, failure: Failure, retrying: bool) -> None:
        """Store the failure in the summary of the run."""
        self._session.summary[f"failure.{failure.time:.0f}"] = failure.summary

    def close(self, error: BaseException | None) -> None:
        """Wait until all data has been sent, and end the Weights & Biases run."""
        self._session.finish(exit_code=0 if error is None else 1)

    def _find_key(self) -> str | None:
        if self.api_key_file is not None:
            return Path(self.api_key_file).expanduser().read_text(encoding="utf-8").strip()
        return self._api_key


def _is_offline(settings: Any, init: Mapping[str, Any]) -> bool:
    """Return True if wandb is offline or disabled, so that it does not know the run's earlier history."""
    return (init.get("mode") or settings.mode) in ("offline", "dryrun", "disabled")
