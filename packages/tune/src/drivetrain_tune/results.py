"""The results of a search: one for each trial."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain import Result
from drivetrain.plugin.callbacks import find_metric, flatten

if TYPE_CHECKING:
    import optuna
    import pandas as pd

__all__ = ["ResultGrid", "TrialResult", "last_value", "number_of", "standing"]

_REPORTS_FILE = "result.json"
_STANDINGS = {"completed": 0, "failed": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult(Result):
    """The result of a trial: the result of its run, and its configuration.

    Attributes:
        config: the ``param_space`` with the values of this trial instead of domains.
        name: the name of the trial, which is also the name of its directory.
        state: ``"completed"``; ``"pruned"`` by the scheduler; ``"stopped"`` because the time budget was used up, or
            because the search was restored with ``resume_unfinished=False``; ``"failed"``; or ``"running"`` if the
            search was interrupted.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    state: str = "completed"


class ResultGrid(Sequence[TrialResult]):
    """The results of a search, in the order of the trials.

    Args:
        results: the results of the trials.
        metric: the metric that ranks the trials.
        mode: ``"max"`` or ``"min"``.
        path: the directory of the search.
        study: the ``optuna.Study`` with all trials.

    Attributes:
        experiment_path: the directory of the search.
        study: the ``optuna.Study``, for its plots and statistics.
    """

    def __init__(
        self,
        results: Sequence[TrialResult],
        *,
        metric: str,
        mode: Literal["max", "min"],
        path: str,
        study: optuna.Study,
    ) -> None:
        self._results = list(results)
        self._metric = metric
        self._mode = mode
        self.experiment_path = path
        self.study = study

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, index: Any) -> Any:
        return self._results[index]

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self._results)

    def __repr__(self) -> str:
        return f"ResultGrid({len(self)} trials in {self.experiment_path})"

    @property
    def errors(self) -> list[Exception]:
        """The errors of the trials that failed, each with the original exception as ``__cause__`` if there is one."""
        return [result.error for result in self._results if result.error is not None]

    @property
    def num_errors(self) -> int:
        """The number of trials that failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """The number of trials that ended without an error."""
        return sum(result.state in ("completed", "pruned", "stopped") for result in self._results)

    def get_best_result(self, metric: str | None = None, mode: Literal["max", "min"] | None = None) -> TrialResult:
        """Return the trial with the best value. The value of a trial is that of its last report with the metric.

        As in Optuna, only trials that have completed are compared. If none of them has the metric, trials that were
        pruned or stopped are compared. A failed trial, and a trial whose last value is NaN, is never the best one.

        Args:
            metric: the metric to compare; None for the metric of the search.
            mode: ``"max"`` or ``"min"``; None for the mode of the search.

        Raises:
            RuntimeError: no trial that can be the best one has reported the metric.
            ValueError: the mode is neither ``"max"`` nor ``"min"``.
        """
        metric, mode = metric or self._metric, mode or self._mode
        if mode not in ("max", "min"):
            raise ValueError(f"get_best_result(mode=...): expected 'max' or 'min', got {mode!r}")
        values = [
            (standing(result.state), value, result)
            for result in self._results
            if result.state != "failed" and (value := last_value(result, metric)) is not None
        ]
        if not values:
            first = f". The first error: {str(self.errors[0]).partition(chr(10))[0]}" if self.errors else ""
            raise RuntimeError(
                f"[DT-753] get_best_result(): expected a trial that has reported {metric!r} and has not failed, got "
                f"none in {len(self)} trials with {self.num_errors} errors{first}"
            )
        sign = -1 if mode == "max" else 1
        return min(values, key=lambda entry: (entry[0], sign * entry[1]))[2]

    def get_dataframe(self) -> pd.DataFrame:
        """Return a row for each trial: its name, state, last metrics and configuration; requires pandas.

        The column of a metric that has the name of another column begins with ``metrics/``.
        """
        import pandas as pd

        configs = [
            {f"config/{path}": value for path, value in flatten(result.config).items()} for result in self._results
        ]
        taken = {"trial", "state", "path", *(column for config in configs for column in config)}
        rows = [
            {
                "trial": result.name,
                "state": result.state,
                **{
                    f"metrics/{name}" if name in taken else name: value
                    for name, value in flatten(result.metrics).items()
                },
                **config,
                "path": result.path,
            }
            for result, config in zip(self._results, configs, strict=True)
        ]
        return pd.DataFrame.from_records(rows)


def standing(state: str) -> int:
    """Return the order in which trials are compared: trials with a smaller number are better, whatever their value."""
    return _STANDINGS.get(state, 1)


def number_of(metrics: Mapping[str, Any], metric: str) -> float | None:
    """Return the value of a metric, which may be NaN; None if it is missing or not a number."""
    value = find_metric(metrics, metric)
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else value


def last_value(result: Result, metric: str) -> float | None:
    """Return the value of a metric in the last report that has it; None if there is none, or if the value is NaN."""
    value = number_of(result.metrics, metric)
    if value is None:
        for line in reversed((result.storage.read_bytes(_REPORTS_FILE) or b"").splitlines()):
            with contextlib.suppress(ValueError, AttributeError, RecursionError):  # an incomplete or damaged line
                value = number_of(json.loads(line), metric)
            if value is not None:
                break
    return None if value is None or math.isnan(value) else value
