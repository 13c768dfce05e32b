"""What the report callbacks of both libraries share: what is reported when, and the model in its checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain import Checkpoint, ConfigurationError, get_context, get_preemption_info, report

__all__ = ["ModelReports", "evaluations", "model_file"]

_EVALUATIONS = "evaluations.json"

Metrics = str | Sequence[str] | Mapping[str, str] | None


class ModelReports:
    """Reports metrics after each round, with the model where it is due.

    Args:
        metrics: which to report; None for all, a mapping to give them other names.
        filename: of the model in a checkpoint.
        frequency: rounds from one checkpoint to the next; 0 for none but the last.
        checkpoint_at_end: have one after the last round.
        results_postprocessing_fn: makes what is reported of the metrics.

    Attributes:
        history: what a checkpoint's file of evaluations is to hold; None for no such file.
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
                f"RayTrainReportCallback(frequency=...): expected a number of rounds, at least 0, got {frequency!r}"
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

    def after_round(
        self, values: dict[str, float], rounds: int, save: Callable[[Path], object], *, last: bool = False
    ) -> bool:
        """Reports a round.

        Args:
            values: all metrics.
            rounds: how many the model has.
            save: writes the model to a file.
            last: there will be no further one.

        Returns:
            Whether training is to stop here, because this process is about to be ended.
        """
        self._last = dict(self._select(values))
        if self._postprocess is not None:
            self._last = dict(self._postprocess(self._last))
        stopping = get_preemption_info() is not None
        due = bool(self._frequency) and rounds % self._frequency == 0
        self._report(save if due or stopping or (last and self._at_end) else None)
        return stopping

    def at_end(self, save: Callable[[Path], object], *, again: bool = False) -> None:
        """Reports the model once more if its last round came without, or if it has changed since."""
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
            report(self._last, checkpoint=Checkpoint.from_directory(directory))


def evaluations(checkpoint: Checkpoint) -> Any:
    """The history of a checkpoint that was made with one; None for others."""
    with checkpoint.as_directory() as directory:
        file = Path(directory, _EVALUATIONS)
        return json.loads(file.read_text()) if file.exists() else None


def model_file(checkpoint: Checkpoint, filename: str, directory: str) -> Path:
    """The model's file of a checkpoint.

    Raises:
        ConfigurationError: there is none.
    """
    path = Path(directory, filename)
    if not path.exists():
        found = ", ".join(sorted(file.name for file in Path(directory).iterdir())) or "no files"
        raise ConfigurationError(f"a checkpoint with the file {filename!r} is wanted, got {found} in {checkpoint.path}")
    return path
