"""A search over an Optuna study: which trials there are, what each is run with, and how far each has come.

Everything that has to survive the driver is in ``tuner.json`` in the directory of the search; the study itself is in
memory, and is made again from that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, PluginNotFoundError, StorageError
from drivetrain.plugin import Storage, find_metric
from drivetrain_tune.results import value_of
from drivetrain_tune.space import Space

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

__all__ = ["STATE_FILE", "ActiveTrial", "Search", "TrialRecord", "TuneConfig", "read_records"]

STATE_FILE = "tuner.json"

StopCondition = Mapping[str, float] | Callable[[str, Mapping[str, Any]], bool]
"""What ``RunConfig(stop=...)`` takes."""
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """What a search looks for, and how.

    Attributes:
        metric: the reported metric that ranks trials; a nested one is named ``outer/inner``.
        mode: ``"max"`` or ``"min"``: which end of it is better.
        num_samples: how many trials, or how many for each combination of grids.
        max_concurrent_trials: how many trials may run at a time; None for as many as the machine has CPUs and GPUs for.
        search_alg: what draws values: a sampler of ``optuna.samplers``; None for Optuna's own choice.
        scheduler: what ends trials early: a pruner of ``optuna.pruners``; None for nothing.
        time_budget_s: seconds after which no trial is started and those that run are stopped; None for no limit.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.
    """

    metric: str
    mode: str
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    search_alg: BaseSampler | None = None
    scheduler: BasePruner | None = None
    time_budget_s: float | None = None

    def __post_init__(self) -> None:
        metric: object = self.metric
        if not isinstance(metric, str) or not metric:
            raise ConfigurationError(f"TuneConfig(metric=...): expected the name of a metric, got {self.metric!r}")
        if self.mode not in ("max", "min"):
            raise ConfigurationError(f"TuneConfig(mode=...): expected 'max' or 'min', got {self.mode!r}")
        counts: dict[str, object] = {"num_samples": self.num_samples}
        if self.max_concurrent_trials is not None:
            counts["max_concurrent_trials"] = self.max_concurrent_trials
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(f"TuneConfig({name}=...): expected an integer of at least 1, got {count!r}")
        for name, given, method in (
            ("search_alg", self.search_alg, "sample_relative"),
            ("scheduler", self.scheduler, "prune"),
        ):
            if given is not None and not callable(getattr(given, method, None)):
                kind = "sampler of optuna.samplers" if name == "search_alg" else "pruner of optuna.pruners"
                raise ConfigurationError(
                    f"TuneConfig({name}=...): expected a {kind}, got {given!r}: those of Ray Tune work with "
                    "ray.tune.Tuner(trainer.as_trainable(), ...)"
                )
        budget: object = self.time_budget_s
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget <= 0):
            raise ConfigurationError(
                f"TuneConfig(time_budget_s=...): expected a positive number of seconds, got {budget!r}"
            )


@dataclass(kw_only=True)
class TrialRecord:
    """What is kept of a trial.

    Attributes:
        number: its number in the search.
        drawn: what Optuna has drawn, by path.
        state: see :class:`~drivetrain_tune.TrialResult`.
        reports: the metric, by the number of the report.
        error: that of a trial that failed, in words.
    """

    number: int
    drawn: dict[str, Any]
    state: str = "running"
    reports: dict[int, float] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        """The trial's name."""
        return f"trial_{self.number:05d}"


class ActiveTrial:
    """A trial that runs: the stop condition of its run.

    Attributes:
        record: what is kept of it.
        config: the search space with its values.
    """

    def __init__(
        self,
        record: TrialRecord,
        config: dict[str, Any],
        asked: optuna.Trial,
        metric: str,
    ) -> None:
        self.record = record
        self.config = config
        self.asked = asked
        self._metric = metric

    def stop_condition(self, usual: StopCondition | None) -> StopCondition:
        """What ends the run: the scheduler, or what would end it in any case."""
        return _Watch(self._is_to_stop, usual)

    def _is_to_stop(self, metrics: Mapping[str, Any]) -> bool:
        """Tells Optuna of a report, on the run's thread; whether the scheduler has it stop."""
        value = value_of(metrics, self._metric)
        step = metrics.get("_training_iteration")
        if value is None or not isinstance(step, int) or step in self.record.reports:  # made again, after a failure
            return False
        self.record.reports[step] = value
        self.asked.report(value, step)
        if self.asked.should_prune():
            self.record.state = "pruned"
        return self.record.state == "pruned"


class _Watch:
    """Asks the search first, then the stop condition that the run has anyway."""

    def __init__(self, is_to_stop: Callable[[Mapping[str, Any]], bool], usual: StopCondition | None) -> None:
        self._is_to_stop = is_to_stop
        self._usual = usual

    def __call__(self, trial_id: str, metrics: Mapping[str, Any]) -> bool:
        if self._is_to_stop(metrics):
            return True
        if self._usual is None or callable(self._usual):
            return self._usual is not None and bool(self._usual(trial_id, metrics))
        return any(find_metric(metrics, key, -math.inf) >= bound for key, bound in self._usual.items())

    def __reduce__(self) -> tuple[object, ...]:
        """A run that is restored outside its search has no scheduler."""
        return _itself, (self._usual,)


def _itself(value: Any) -> Any:
    return value


class Search:
    """The trials of a search.

    Args:
        space: what their values are drawn from.
        config: what is looked for.
        storage: the directory of the search.
        records: the trials that there were, of which those in the state ``"running"`` are to go on.

    Attributes:
        records: what is kept of each trial, in their order.
        study: Optuna's.
        total: how many trials there are to be.

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
        for record in self.records:
            if record.state != "running":
                self._tell_again(record)

    @property
    def has_next(self) -> bool:
        """Whether there are trials left to start."""
        return bool(self._unfinished) or len(self.records) < self.total

    def changes(self, argument: str) -> bool:
        """Whether the search space has an argument of the trainer."""
        return argument in self._space.tree

    def next(self) -> ActiveTrial:
        """The next trial: one that was interrupted, or a new one."""
        record = self._unfinished.pop(0) if self._unfinished else None
        fixed = self._grid[len(self.records) % len(self._grid)] if record is None else record.drawn
        if fixed:
            self.study.enqueue_trial(fixed)
        asked = self.study.ask(self._space.distributions())
        if record is None:
            record = TrialRecord(number=len(self.records), drawn=dict(asked.params))
            self.records.append(record)
        self.save()
        return ActiveTrial(record, self._space.config(record.drawn), asked, self._config.metric)

    def postpone(self, trial: ActiveTrial) -> None:
        """Leaves a trial that was not started to whoever continues the search."""
        self._unfinished.append(trial.record)

    def finish(self, trial: ActiveTrial, state: str, error: str = "") -> None:
        """Notes how a trial has ended, and tells Optuna."""
        record = trial.record
        record.state, record.error = state, error
        told = self._told(record)
        self.study.tell(trial.asked, told.value, told.state)
        self.save()

    def config(self, record: TrialRecord) -> dict[str, Any]:
        """What a trial is run with."""
        return self._space.config(record.drawn)

    def save(self) -> None:
        """Writes the state of the search."""
        trials = [
            asdict(record) if record.state != "running" else {**_facts(record), "reports": {}}
            for record in self.records
        ]
        text = json.dumps({"version": VERSION, "trials": trials}, indent=1)
        self._storage.write_bytes(STATE_FILE, text.encode(), durable=False)

    def _told(self, record: TrialRecord) -> _Told:
        from optuna.trial import TrialState

        value = record.reports[max(record.reports)] if record.reports else None
        if value is None or record.state == "failed":
            return _Told(TrialState.FAIL, None)
        if record.state == "completed":
            return _Told(TrialState.COMPLETE, value)
        return _Told(TrialState.PRUNED, None)

    def _tell_again(self, record: TrialRecord) -> None:
        import optuna

        told = self._told(record)
        self.study.add_trial(
            optuna.trial.create_trial(
                state=told.state,
                value=told.value,
                params=record.drawn,
                distributions=self._space.distributions(),
                intermediate_values=record.reports,
            )
        )


@dataclass(frozen=True, slots=True)
class _Told:
    state: optuna.trial.TrialState
    value: float | None


def _facts(record: TrialRecord) -> dict[str, Any]:
    """What a record says that no other thread changes."""
    return {"number": record.number, "drawn": record.drawn, "state": "running", "error": record.error}


def _create_study(config: TuneConfig) -> optuna.Study:
    try:
        import optuna
    except ImportError:
        raise PluginNotFoundError(
            'drivetrain_tune requires Optuna, which is not installed. Run: pip install "drivetrain[tune]"'
        ) from None
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would tell of each study
    try:
        return optuna.create_study(
            direction="maximize" if config.mode == "max" else "minimize",
            sampler=config.search_alg,
            pruner=config.scheduler or optuna.pruners.NopPruner(),
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def read_records(storage: Storage) -> list[TrialRecord]:
    """The trials of a search that was begun in a directory.

    Raises:
        StorageError: there is none, or of a newer drivetrain.
    """
    data = storage.read_bytes(STATE_FILE)
    if data is None:
        raise StorageError(
            f"Tuner.restore: expected the directory of a search with a {STATE_FILE}, found none in {storage.root}"
        )
    try:
        state = json.loads(data)
        if state["version"] > VERSION:
            raise StorageError(f"{storage.path(STATE_FILE)} was written by a newer drivetrain: upgrade drivetrain")
        return [
            TrialRecord(**{**trial, "reports": {int(step): value for step, value in trial["reports"].items()}})
            for trial in state["trials"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{storage.path(STATE_FILE)}: expected the state of a search, got {error!r}") from error
