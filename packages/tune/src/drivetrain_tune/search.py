"""The trials of a search, with their configurations and states. An Optuna study draws the values of the trials.

All state that must survive the driver is in ``tuner.json`` in the directory of the search. The study is only in memory,
and is recreated from that file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from drivetrain import ConfigurationError, PluginNotFoundError, StorageError
from drivetrain.plugin.callbacks import find_metric
from drivetrain.plugin.storage import Storage
from drivetrain_tune.results import number_of
from drivetrain_tune.space import Space, suggest

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

__all__ = ["STATE_FILE", "ActiveTrial", "Search", "TrialRecord", "TuneConfig", "read_records"]

STATE_FILE = "tuner.json"

StopCondition = Mapping[str, float] | Callable[[str, Mapping[str, Any]], bool]
"""The values that ``RunConfig(stop=...)`` accepts."""
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """The objective of a search, and its settings.

    Attributes:
        metric: the reported metric that ranks trials; a nested metric is named ``outer/inner``.
        mode: ``"max"`` if larger values are better, ``"min"`` if smaller values are better.
        num_samples: the number of trials; with grids, the number of trials for each combination of their values.
        max_concurrent_trials: the maximum number of trials at the same time; None for as many as the CPUs and GPUs of
            the machine allow.
        search_alg: a sampler of ``optuna.samplers``, which draws the values; None for Optuna's default.
        scheduler: a pruner of ``optuna.pruners``, which stops trials early; None stops no trial early.
        time_budget_s: seconds after which no trial is started and running trials are stopped; None for no limit.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.
    """

    metric: str
    mode: Literal["max", "min"]
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    search_alg: BaseSampler | None = None
    scheduler: BasePruner | None = None
    time_budget_s: float | None = None

    def __post_init__(self) -> None:
        metric: object = self.metric
        if not isinstance(metric, str) or not metric:
            raise ConfigurationError(
                f"[DT-101] TuneConfig(metric=...): expected the name of a metric, got {self.metric!r}"
            )
        if self.mode not in ("max", "min"):
            raise ConfigurationError(f"[DT-101] TuneConfig(mode=...): expected 'max' or 'min', got {self.mode!r}")
        counts: dict[str, object] = {"num_samples": self.num_samples}
        if self.max_concurrent_trials is not None:
            counts["max_concurrent_trials"] = self.max_concurrent_trials
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(f"[DT-101] TuneConfig({name}=...): expected an integer >= 1, got {count!r}")
        for name, value, method in (
            ("search_alg", self.search_alg, "sample_relative"),
            ("scheduler", self.scheduler, "prune"),
        ):
            if value is not None and not callable(getattr(value, method, None)):
                kind = "sampler of optuna.samplers" if name == "search_alg" else "pruner of optuna.pruners"
                raise ConfigurationError(
                    f"[DT-101] TuneConfig({name}=...): expected a {kind}, got {value!r}. To use search algorithms and "
                    "schedulers of Ray Tune, call ray.tune.Tuner(trainer.as_trainable(), ...)"
                )
        budget: object = self.time_budget_s
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget <= 0):
            raise ConfigurationError(
                f"[DT-101] TuneConfig(time_budget_s=...): expected a positive number of seconds, got {budget!r}"
            )


@dataclass(kw_only=True)
class TrialRecord:
    """The stored state of a trial.

    Attributes:
        number: the number of the trial in the search.
        drawn: the values that Optuna has drawn, by their paths in the search space.
        computed: the return values of the functions in the search space that can be stored, by path. A function may
            return another value when it is called again.
        state: see :class:`~drivetrain_tune.TrialResult`.
        reports: the reported values of the search's metric, by the number of the report; NaN if the training diverged.
        error: the error message of a failed trial; empty for other trials.
    """

    number: int
    drawn: dict[str, Any]
    computed: dict[str, Any] = field(default_factory=dict)
    state: str = "running"
    reports: dict[int, float] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        """The trial's name."""
        return f"trial_{self.number:05d}"

    @property
    def last(self) -> float | None:
        """The last reported value of the search's metric; None if there is none, or if it is NaN."""
        value = self.reports[max(self.reports)] if self.reports else None
        return None if value is None or math.isnan(value) else value


class ActiveTrial:
    """A running trial, which decides whether its run must stop.

    Attributes:
        record: the stored state of the trial.
        config: the search space with the values of this trial instead of domains.
        optuna_trial: Optuna's object for the trial.
    """

    def __init__(
        self,
        record: TrialRecord,
        config: dict[str, Any],
        optuna_trial: optuna.Trial,
        metric: str,
    ) -> None:
        self.record = record
        self.config = config
        self.optuna_trial = optuna_trial
        self._metric = metric

    def stop_condition(self, usual: StopCondition | None) -> StopCondition:
        """Return a condition that stops the run if the scheduler stops the trial, or if ``usual`` is met.

        Args:
            usual: the stop condition in the configuration of the run.
        """
        return _Watch(self._should_stop, usual)

    def _should_stop(self, metrics: Mapping[str, Any]) -> bool:
        """Pass a report to Optuna, on the run's thread; return True if the scheduler stops the trial."""
        value = number_of(metrics, self._metric)
        step = metrics.get("_training_iteration")
        if value is None or not isinstance(step, int) or step in self.record.reports:  # reported before a failure
            return False
        self.record.reports[step] = value
        self.optuna_trial.report(value, step)
        if self.optuna_trial.should_prune():
            self.record.state = "pruned"
        return self.record.state == "pruned"


class _Watch:
    """A stop condition that checks the search's condition first, and then the run's usual stop condition."""

    def __init__(self, should_stop: Callable[[Mapping[str, Any]], bool], usual: StopCondition | None) -> None:
        self._should_stop = should_stop
        self._usual = usual

    def __call__(self, trial_id: str, metrics: Mapping[str, Any]) -> bool:
        if self._should_stop(metrics):
            return True
        if self._usual is None or callable(self._usual):
            return self._usual is not None and bool(self._usual(trial_id, metrics))
        return any(find_metric(metrics, key, -math.inf) >= bound for key, bound in self._usual.items())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the run's own stop condition: a run that is restored outside its search has no scheduler."""
        return _identity, (self._usual,)


def _identity(value: Any) -> Any:
    return value


class Search:
    """The trials of a search.

    Args:
        space: the search space.
        config: the objective and settings of the search.
        storage: the directory of the search.
        records: the trials of a restored search; trials in the state ``"running"`` are resumed.

    Attributes:
        records: the stored states of the trials, in order.
        study: the ``optuna.Study``.
        total: the number of trials of the complete search.

    Raises:
        PluginNotFoundError: Optuna is not installed.
    """

    def __init__(self, space: Space, config: TuneConfig, storage: Storage, records: Sequence[TrialRecord] = ()) -> None:
        self._space = space
        self._config = config
        self._storage = storage
        self._grid = space.grid
        self.records = list(records)
        self.total = config.num_samples * len(self._grid)
        self.study = _create_study(config)
        self._unfinished = [record for record in self.records if record.state == "running"]
        self._configs: dict[int, dict[str, Any]] = {}
        for record in self.records:
            if record.state != "running":
                self._add_to_study(record)

    @property
    def has_next(self) -> bool:
        """True if there are trials left to start."""
        return bool(self._unfinished) or len(self.records) < self.total

    def contains(self, argument: str) -> bool:
        """Return True if the search space contains this argument of the trainer."""
        return argument in self._space.tree

    def next(self) -> ActiveTrial:
        """Return the next trial to run: an interrupted trial of a restored search if one is left, or a new trial."""
        record = self._unfinished.pop(0) if self._unfinished else None
        fixed = self._grid[len(self.records) % len(self._grid)] if record is None else record.drawn
        if fixed:
            self.study.enqueue_trial(fixed)
        optuna_trial = self.study.ask()
        if record is None:
            drawn = self._space.draw(optuna_trial)
            config, computed = drawn.config, {path: value for path, value in drawn.computed.items() if _is_json(value)}
            record = TrialRecord(number=len(self.records), drawn=drawn.values, computed=computed)
            self.records.append(record)
        else:
            for path, distribution in self._space.distributions(record.drawn, record.computed).items():
                suggest(optuna_trial, path, distribution)
            config = self.config(record)
        self._configs[record.number] = config
        self.save()
        return ActiveTrial(record, config, optuna_trial, self._config.metric)

    def postpone(self, trial: ActiveTrial) -> None:
        """Put back a trial that was not started, so that it runs after the search is restored."""
        self._unfinished.append(trial.record)

    def finish(self, trial: ActiveTrial, state: str, error: str = "") -> None:
        """Record the end of a trial, and pass it to Optuna."""
        record = trial.record
        record.state, record.error = state, error
        outcome = self._outcome(record)
        self.study.tell(trial.optuna_trial, outcome.value, outcome.state)
        self.save()

    def config(self, record: TrialRecord) -> dict[str, Any]:
        """Return the configuration of a trial."""
        config = self._configs.get(record.number)
        return self._space.config(record.drawn, record.computed) if config is None else config

    def save(self) -> None:
        """Write the state of the search."""
        trials = [asdict(record) if record.state != "running" else _running_state(record) for record in self.records]
        text = json.dumps({"version": VERSION, "trials": trials}, indent=1)
        self._storage.write_bytes(STATE_FILE, text.encode(), durable=False)

    def _outcome(self, record: TrialRecord) -> _Outcome:
        from optuna.trial import TrialState

        if record.state == "failed" or not record.reports:
            return _Outcome(TrialState.FAIL, None)
        if record.state != "completed":
            return _Outcome(TrialState.PRUNED, None)
        return _Outcome(TrialState.FAIL if record.last is None else TrialState.COMPLETE, record.last)

    def _add_to_study(self, record: TrialRecord) -> None:
        import optuna

        outcome = self._outcome(record)
        self.study.add_trial(
            optuna.trial.create_trial(
                state=outcome.state,
                value=outcome.value,
                params=record.drawn,
                distributions=self._space.distributions(record.drawn, record.computed),
                intermediate_values=record.reports,
            )
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    state: optuna.trial.TrialState
    value: float | None


def _running_state(record: TrialRecord) -> dict[str, Any]:
    """Return the state of a running trial to store, without the field that the run's thread changes."""
    return {**asdict(replace(record, reports={})), "state": "running"}


def _is_json(value: Any) -> bool:
    """Return True if a JSON file can store the value without changing it."""
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError, RecursionError):
        return False


def _create_study(config: TuneConfig) -> optuna.Study:
    try:
        import optuna
    except ImportError:
        raise PluginNotFoundError(
            '[DT-601] drivetrain_tune requires Optuna, which is not installed. Run: pip install "drivetrain[tune]"'
        ) from None
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # Optuna logs every new study
    try:
        return optuna.create_study(
            direction="maximize" if config.mode == "max" else "minimize",
            sampler=config.search_alg,
            pruner=config.scheduler or optuna.pruners.NopPruner(),
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def read_records(storage: Storage) -> list[TrialRecord]:
    """Return the trials of the search in a directory.

    Raises:
        StorageError: there is no search in the directory, or its file is damaged or was written by a newer drivetrain.
    """
    state = storage.read_any_json(STATE_FILE)
    if state is None:
        raise StorageError(f"[DT-755] {storage.root}: expected the directory of a search, got one without {STATE_FILE}")
    try:
        if state["version"] > VERSION:
            raise StorageError(
                f"[DT-414] {storage.path(STATE_FILE)}: expected a file of format version {VERSION} or older, got "
                f"version {state['version']} of a newer drivetrain. Upgrade drivetrain"
            )
        return [
            TrialRecord(**{**trial, "reports": {int(step): value for step, value in trial["reports"].items()}})
            for trial in state["trials"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"[DT-413] {storage.path(STATE_FILE)}: expected the state of a search, got {error!r}"
        ) from error
