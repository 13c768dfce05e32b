"""The results of a search: one for each trial."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain import Result
from drivetrain.plugin import find_metric, flatten

if TYPE_CHECKING:
    import optuna
    import pandas as pd

__all__ = ["ResultGrid", "TrialResult"]


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
        self, results: Sequence[TrialResult], *, metric: str, mode: str, path: str, study: optuna.Study
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

    def get_best_result(self, metric: str | None = None, mode: str | None = None) -> TrialResult:
        """Return the trial whose last report has the best value, including trials that were stopped early.

        Args:
            metric: the metric to compare; None for the metric of the search.
            mode: ``"max"`` or ``"min"``; None for the mode of the search.

        Raises:
            RuntimeError: no trial has reported the metric.
            ValueError: the mode is neither ``"max"`` nor ``"min"``.
        """
        metric, mode = metric or self._metric, mode or self._mode
        if mode not in ("max", "min"):
            raise ValueError(f"get_best_result(mode=...): expected 'max' or 'min', got {mode!r}")
        values = [
            (value, result) for result in self._results if (value := value_of(result.metrics, metric)) is not None
        ]
        if not values:
            raise RuntimeError(
                f"get_best_result(): expected a trial that has reported {metric!r}, got none in {len(self)} trials "
                f"with {self.num_errors} errors"
            )
        return (max if mode == "max" else min)(values, key=lambda pair: pair[0])[1]

    def get_dataframe(self) -> pd.DataFrame:
        """Return a row for each trial: its name, state, last metrics and configuration; requires pandas."""
        import pandas as pd

        rows = [
            {
                "trial": result.name,
                "state": result.state,
                **flatten(result.metrics),
                **{f"config/{path}": value for path, value in flatten(result.config).items()},
                "path": result.path,
            }
            for result in self._results
        ]
        return pd.DataFrame.from_records(rows)


def value_of(metrics: Mapping[str, Any], metric: str) -> float | None:
    """Return the value of a metric; None if it is missing or not a number."""
    value = find_metric(metrics, metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return value
