"""The code that both reporting callbacks share: it reports each round's metrics, and saves the model at intervals."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain import (
    Checkpoint,
    CheckpointError,
    ConfigurationError,
    get_checkpoint,
    get_context,
    get_preemption_info,
    report,
    resume_later,
)
from drivetrain.plugin.storage import Storage, locate

__all__ = ["ModelReports", "Rounds", "evaluations", "model_file"]

_EVALUATIONS = "evaluations.json"
_ROUNDS = "rounds.json"

Metrics = str | Sequence[str] | Mapping[str, str] | None


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run, which are stored next to the model in each checkpoint.

    Attributes:
        completed: the number of rounds that the run has trained, in all attempts. Early stopping may have removed the
            last of them from the model.
        before: the number of rounds of the model with which the run began.
        updates: True if the rounds have updated trees of that model, instead of adding trees.
    """

    completed: int
    before: int
    updates: bool = False

    @classmethod
    def read(cls, checkpoint: Checkpoint, of_model: int) -> Rounds:
        """Read the rounds from a checkpoint.

        Args:
            checkpoint: the checkpoint.
            of_model: the number of rounds of its model, which are the result if the checkpoint does not contain any.

        Raises:
            StorageError: see :func:`evaluations`.
        """
        found = _read_json(checkpoint, _ROUNDS)
        if not isinstance(found, dict) or not all(type(found.get(key)) is int for key in ("completed", "before")):
            return cls(of_model, 0)
        return cls(found["completed"], found["before"], found.get("updates") is True)

    def is_shortened(self, of_model: int) -> bool:
        """Return True if early stopping has removed rounds from the model, so the training was complete."""
        return not self.updates and self.completed > of_model - self.before


class ModelReports:
    """Reports metrics after each round, with the model when a checkpoint is due.

    Args:
        metrics: the names of the metrics to report; None for all; a mapping ``{reported name: metric}`` to rename them.
        filename: the file name of the model in a checkpoint.
        frequency: the number of rounds between checkpoints; 0 to save none before the last round.
        checkpoint_at_end: save a checkpoint after the last round.
        results_postprocessing_fn: turns the dict of metrics into the metrics to report.

    Attributes:
        history: the evaluations of all rounds, which are stored in each checkpoint; None to store none.
        rounds: the rounds of the run until now.
    """

    def __init__(
        self,
        metrics: Metrics,
        filename: str,
        frequency: int,
        checkpoint_at_end: bool,
        results_postprocessing_fn: Callable[[dict[str, float]], Mapping[str, Any]] | None,
    ) -> None:
        if type(frequency) is not int or frequency < 0:
            raise ConfigurationError(
                f"[DT-101] RayTrainReportCallback(frequency=...): expected a number of rounds >= 0, got {frequency!r}"
            )
        names = [metrics] if isinstance(metrics, str) else metrics
        self._names = names if isinstance(names, Mapping) or names is None else {name: name for name in names}
        self._filename = filename
        self._frequency = frequency
        self._at_end = checkpoint_at_end
        self._postprocess = results_postprocessing_fn
        self._last: dict[str, Any] = {}
        self._saved = False
        self.history: object = None
        self.rounds = Rounds(0, 0)

    def start(self, of_model: int) -> None:
        """Begin with a model.

        Args:
            of_model: the number of rounds of the model; 0 if the training does not continue from a model.
        """
        checkpoint = get_checkpoint() if of_model else None
        if checkpoint is None:
            self.rounds = Rounds(0, of_model)
        else:
            completed = Rounds.read(checkpoint, of_model).completed
            self.rounds = Rounds(completed, of_model - completed)

    def after_round(self, values: dict[str, float], save: Callable[[Path], object], *, last: bool = False) -> bool:
        """Report a round.

        Args:
            values: the values of all metrics, by name.
            save: writes the model to a file.
            last: True if this is the last round.

        Returns:
            True if the training has to stop after this round because of a preemption. The run is resumed later.
        """
        self.rounds = replace(self.rounds, completed=self.rounds.completed + 1)
        self._last = dict(self._select(values))
        if self._postprocess is not None:
            self._last = dict(self._postprocess(self._last))
        stopping = get_preemption_info() is not None
        due = bool(self._frequency) and self.rounds.completed % self._frequency == 0
        due = (due or stopping) and not self.rounds.updates  # a model with some of its trees updated is of no use
        self._report(save if due or (last and self._at_end) else None)
        if stopping and not last:
            resume_later()
        return stopping and not last

    def at_end(self, save: Callable[[Path], object], *, again: bool = False) -> None:
        """Save and report the model if the report of the last round did not contain it, or if ``again`` is True."""
        if self._at_end and (again or not self._saved):
            self._report(save)

    def _select(self, values: dict[str, float]) -> Mapping[str, float]:
        if self._names is None:
            return values
        missing = sorted(set(self._names.values()) - set(values))
        if missing:
            raise ConfigurationError(
                "RayTrainReportCallback(metrics=...): expected names of metrics "
                f"({', '.join(map(repr, values)) or 'there are none'}), got {', '.join(map(repr, missing))}"
            )
        return {name: values[source] for name, source in self._names.items()}

    def _report(self, save: Callable[[Path], object] | None) -> None:
        self._saved = save is not None
        if save is None or get_context().get_world_rank() != 0:
            report(self._last)
            return
        with tempfile.TemporaryDirectory() as directory:
            save(Path(directory, self._filename))
            if self.history is not None:
                Path(directory, _EVALUATIONS).write_text(json.dumps(self.history))
            Path(directory, _ROUNDS).write_text(json.dumps(asdict(self.rounds)))
            report(self._last, checkpoint=Checkpoint.from_directory(directory))


def evaluations(checkpoint: Checkpoint) -> Any:
    """Return the evaluations that were stored in a checkpoint; None if it contains none.

    Raises:
        StorageError: the file with the evaluations is not a regular file, is too large, or contains no valid JSON.
    """
    return _read_json(checkpoint, _EVALUATIONS)


def _read_json(checkpoint: Checkpoint, name: str) -> Any:
    with checkpoint.as_directory() as directory:
        # The checkpoint may come from an untrusted source, so only a regular file is read, up to a size limit.
        return Storage(*locate(directory, what="the checkpoint")).read_any_json(name)


def model_file(checkpoint: Checkpoint, filename: str, directory: str) -> Path:
    """Return the path of the model in a checkpoint. The file may be a link, as in a snapshot of a model hub.

    Args:
        checkpoint: the checkpoint, for error messages.
        filename: the file name of the model.
        directory: the local directory with the files of the checkpoint.

    Raises:
        ConfigurationError: the checkpoint has no such file.
        CheckpointError: the model is not a regular file but, for example, a named pipe.
    """
    path = Path(directory, filename)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: expected a regular file with the model, got something else")
    if not path.exists():
        files = ", ".join(sorted(file.name for file in Path(directory).iterdir())) or "no files"
        raise ConfigurationError(f"{checkpoint.path}: expected a checkpoint with a file {filename!r}, got {files}")
    return path
