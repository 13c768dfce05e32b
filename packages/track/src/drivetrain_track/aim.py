"""Logs reports to Aim."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain_track._entries import Entry, Ranks
from drivetrain_track._tracker import TrackerCallback, numbers, parameters

if TYPE_CHECKING:
    from drivetrain.plugin import Failure, Run

__all__ = ["AimLoggerCallback"]


class AimLoggerCallback(TrackerCallback):
    """Logs a run to an Aim repository.

    All attempts and resumes of a run are logged to the same Aim run, whose name ends with the id of the drivetrain run.

    Args:
        repo: the repository: a directory, or the address of a server; None for Aim's default.
        experiment_name: the experiment; None for the name of the run.
        system_tracking_interval: seconds between measurements of the resource usage of the driver's machine; None
            measures nothing.
        ranks: see :class:`~drivetrain_track.TrackerCallback`.
        drain_timeout_s: see :class:`~drivetrain_track.TrackerCallback`.

    Raises:
        PluginNotFoundError: ``aim`` is not installed.
        ConfigurationError: an argument is invalid.
    """

    title: ClassVar[str] = "aim"
    package: ClassVar[str] = "aim"
    extra: ClassVar[str] = "aim"

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        experiment_name: str | None = None,
        *,
        system_tracking_interval: float | None = None,
        ranks: Ranks = "rank0",
        drain_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(ranks=ranks, drain_timeout_s=drain_timeout_s)
        self.repo = None if repo is None else os.fspath(repo)
        self.experiment_name = experiment_name
        self.system_tracking_interval = system_tracking_interval

    def open(self, run: Run) -> int | None:
        """Find the Aim run, or create it."""
        import aim

        repo = aim.Repo.from_path(self.repo, init=True) if self.repo else aim.Repo.default_repo(init=True)
        name = f"{run.name} {run.id}"
        # Search by name, because Aim stores names immediately. Other parameters can only be queried after indexing.
        hashes = [earlier.run.hash for earlier in repo.query_runs(f"run.name == {name!r}", report_mode=0).iter_runs()]
        self._session: Any = aim.Run(
            hashes[0] if hashes else None,
            repo=repo,
            experiment=self.experiment_name or run.name,
            system_tracking_interval=self.system_tracking_interval,
            capture_terminal_logs=False,
        )
        if not hashes:
            self._session.name = name
            self._session["hparams"] = parameters(run)
        return int(self._session.get("training_iteration", 0))

    def log(self, entries: Sequence[Entry]) -> None:
        """Log the numbers; the step is the report's iteration."""
        for iteration, values in [(entry.iteration, numbers(entry.metrics)) for entry in entries]:
            for name, value in values.items():
                self._session.track(value, name=name, step=iteration)
        self._session["training_iteration"] = entries[-1].iteration

    def log_failure(self, failure: Failure, retrying: bool) -> None:
        """Store the failure as a parameter of the run."""
        self._session["failures", f"{failure.time:.0f}"] = failure.summary

    def close(self, error: BaseException | None) -> None:
        """Close the Aim run."""
        self._session.close()
