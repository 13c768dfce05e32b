"""What a search leaves: a result for each trial."""

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
    """The result of a trial: that of its run, and what it was run with.

    Attributes:
        config: its ``param_space`` with values in the place of domains.
        name: its name, which is also its directory's.
        state: ``"completed"``, ``"pruned"`` by the scheduler, ``"stopped"`` as the time was over, ``"failed"``, or
            ``"running"`` where a search was interrupted.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    state: str = "completed"


class ResultGrid(Sequence[TrialResult]):
    """The results of a search, in the order of the trials.

    Args:
        results: those.
        metric: what ranks them.
        mode: ``"max"`` or ``"min"``.
        path: the directory of the search.
        study: Optuna's, with everything that it was told.

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

    def __getitem__(self, place: Any) -> Any:
        return self._results[place]

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self._results)

    def __repr__(self) -> str:
        return f"ResultGrid({len(self)} trials in {self.experiment_path})"

    @property
    def errors(self) -> list[Exception]:
        """The errors of the trials that failed, each with its cause."""
        return [result.error for result in self._results if result.error is not None]

    @property
    def num_errors(self) -> int:
        """How many trials failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """How many trials are over without an error."""
        return sum(result.state in ("completed", "pruned", "stopped") for result in self._results)

    def get_best_result(self, metric: str | None = None, mode: str | None = None) -> TrialResult:
        """The trial whose last report has the best value, those that were stopped early included.

        Args:
            metric: of which metric; None for the search's.
            mode: ``"max"`` or ``"min"``; None for the search's.

        Raises:
            RuntimeError: no trial has reported the metric.
            ValueError: the mode is none of the two.
        """
        metric, mode = metric or self._metric, mode or self._mode
        if mode not in ("max", "min"):
            raise ValueError(f"get_best_result(mode=...): expected 'max' or 'min', got {mode!r}")
        found = [(value, result) for result in self._results if (value := value_of(result.metrics, metric)) is not None]
        if not found:
            raise RuntimeError(
                f"get_best_result: expected a trial that has reported {metric!r}, found none among {len(self)} with "
                f"{self.num_errors} errors"
            )
        return (max if mode == "max" else min)(found, key=lambda pair: pair[0])[1]

    def get_dataframe(self) -> pd.DataFrame:
        """A row for each trial: its name, its state, its last metrics and its values; needs pandas."""
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
    """The value of a metric; None where there is none, or it is no number."""
    value = find_metric(metrics, metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return value
