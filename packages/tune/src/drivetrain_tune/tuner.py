"""``Tuner``: a search for hyperparameters on this machine, trial after trial or as many at a time as its CPUs allow."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import cloudpickle

from drivetrain import (
    ConfigurationError,
    DataParallelTrainer,
    Result,
    RunConfig,
    RunExistsError,
    SerializationError,
    StorageError,
    TrainingFailedError,
)
from drivetrain.plugin import (
    Console,
    ForkServers,
    RunLock,
    Storage,
    Trial,
    check_param_space,
    locate,
    open_storage,
    quick,
    runs_location,
)
from drivetrain_tune.results import ResultGrid, TrialResult
from drivetrain_tune.runner import Progress, Runner, Trials
from drivetrain_tune.search import STATE_FILE, ActiveTrial, Search, TrialRecord, TuneConfig, read_records
from drivetrain_tune.space import Space

__all__ = ["Tuner"]

TUNER_FILE = "tuner.pkl"
VERSION = 1


class Tuner:
    """Tries a trainer with values from a search space, and finds the best.

    Args:
        trainable: a trainer, or a train function, which then has one worker.
        param_space: by the names of the trainer's arguments; what it has is merged with what the trainer was made with.
            Of a function, the config.
        tune_config: what is looked for, and how.
        run_config: for the run of each trial, in place of the trainer's. ``name`` and ``storage_path`` are those of the
            search, in whose directory each trial's run has its own.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the space touches what all trials share.

    Example:
        >>> import drivetrain
        >>> import drivetrain_tune as tune
        >>> from drivetrain import RunConfig
        >>> def train_func(config):
        ...     drivetrain.report({"loss": (config["x"] - 2) ** 2})
        >>> tuner = tune.Tuner(
        ...     train_func,
        ...     param_space={"x": tune.grid_search([1, 2, 3])},
        ...     tune_config=tune.TuneConfig(metric="loss", mode="min"),
        ...     run_config=RunConfig(verbose=0),
        ... )
        >>> tuner.fit().get_best_result().config
        {'x': 2}
    """

    def __init__(
        self,
        trainable: DataParallelTrainer | Callable[..., Any],
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: TuneConfig,
        run_config: RunConfig | None = None,
    ) -> None:
        for name, value, kind in (("tune_config", tune_config, TuneConfig), ("run_config", run_config, RunConfig)):
            if not isinstance(value, kind) and (value is not None or name == "tune_config"):
                raise ConfigurationError(f"Tuner({name}=...): expected a {kind.__name__}, got {value!r}")
        self._of_function = not isinstance(trainable, DataParallelTrainer)
        if isinstance(trainable, DataParallelTrainer):
            self._trainer = trainable
        elif isinstance(trainable, type) or getattr(trainable, "__module__", "").startswith("ray."):
            raise ConfigurationError(
                f"Tuner: expected a trainer or a train function, got {trainable!r}: what as_trainable() returns is for "
                "ray.tune.Tuner"
            )
        else:
            self._trainer = DataParallelTrainer(trainable)
        self._param_space = dict(param_space or {})
        check_param_space(self._changes(self._param_space), self._trainer.known_arguments)
        self._space = Space(self._param_space)
        self._config = tune_config
        self._run_config = run_config or self._trainer.given.get("run_config") or RunConfig()
        if self._run_config.resume != "never":
            raise ConfigurationError(
                f"Tuner(run_config=RunConfig(resume={self._run_config.resume!r})): a search is continued with "
                "Tuner.restore(path, trainable)"
            )
        self._records: list[TrialRecord] = []
        self._restored: Storage | None = None
        self._grid: ResultGrid | None = None

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        trainable: DataParallelTrainer | Callable[..., Any],
        *,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: Mapping[str, Any] | None = None,
        storage_filesystem: Any | None = None,
    ) -> Tuner:
        """A tuner that continues a search; :meth:`fit` runs what is left of it.

        This unpickles ``tuner.pkl``, which can execute code: restore only searches that you trust.

        Args:
            path: the directory of the search.
            trainable: what the search was begun with.
            resume_unfinished: trials that ran when the search ended go on from their latest checkpoints; False leaves
                them as they are.
            resume_errored: trials that have failed go on from their latest checkpoints.
            restart_errored: trials that have failed start again from the beginning.
            param_space: the search space, where the stored one cannot be loaded; the same as before.
            storage_filesystem: the filesystem of pyarrow or fsspec that ``path`` is on; None for the one it names.

        Raises:
            StorageError: there is no search in that directory.
            SerializationError: what is stored cannot be loaded; give ``param_space``.
        """
        storage = Storage(*locate(path, storage_filesystem, what="Tuner.restore"))
        records = read_records(storage)
        stored = _load(storage)
        if param_space is None and "param_space" not in stored:
            raise SerializationError("Tuner.restore cannot load the stored param_space here: give it anew")
        if not {"tune_config", "run_config"} <= stored.keys():
            raise SerializationError(f"Tuner.restore cannot load {storage.path(TUNER_FILE)} here")
        tuner = cls(
            trainable,
            param_space=stored.get("param_space") if param_space is None else param_space,
            tune_config=stored["tune_config"],
            run_config=stored["run_config"],
        )
        if any(record.drawn.keys() != tuner._space.domains.keys() for record in records):
            raise ConfigurationError(
                f"Tuner.restore: expected the search space that the search was begun with, got values for "
                f"{sorted(records[0].drawn)} in {storage.root}, and domains at {sorted(tuner._space.domains)}"
            )
        for record in records:
            storage.inside(record.name)  # refuses a trial's directory that is a link to another place
            again = record.state == "failed" and (resume_errored or restart_errored)
            if again and restart_errored:
                storage.delete(record.name)
            if again:
                record.state, record.error = "running", ""
            elif record.state == "running" and not resume_unfinished:
                record.state = "stopped"
            if record.state == "running":
                record.reports = {}
        tuner._records, tuner._restored = records, storage
        return tuner

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any | None = None) -> bool:
        """Whether there is a search in that directory that :meth:`restore` can continue."""
        return Storage(*locate(path, storage_filesystem, what="Tuner.can_restore")).exists(STATE_FILE)

    def fit(self) -> ResultGrid:
        """Runs the trials, and waits for them.

        A trial that fails is no reason to end the others; its error is in its result. Ctrl-C ends all of them, and
        :meth:`restore` goes on where they were.

        Raises:
            ConfigurationError: a trial's values are none that the trainer can be made with.
            PluginNotFoundError: Optuna is not installed.
            ResourceError: a trial wants more than there is.
            RunExistsError: there is a search of that name.
            RunInUseError: another driver is working on it.
            SerializationError: the train function or its config cannot be pickled.
            StorageError: the directory of the search cannot be written.
            KeyboardInterrupt: Ctrl-C; every worker has ended.
        """
        storage = self._restored or self._new_storage()
        console = Console()
        with contextlib.ExitStack() as stack:
            if self._restored is None and quick(storage).exists(STATE_FILE):
                raise RunExistsError(
                    f"a search exists in {storage.root} and was left as it is: choose another name, delete it, or "
                    "continue it with Tuner.restore(path, trainable)"
                )
            search = Search(self._space, self._config, storage, self._records)
            open_storage(quick(storage))
            stack.enter_context(RunLock(quick(storage), console).hold())
            if self._restored is None:
                self._store(storage)
            progress = Progress(os.path.basename(storage.root), self._config, console, self._run_config.verbose)
            trials = Trials(
                make=partial(self._make, storage),
                given=self._trainer.given,
                changes=self._changes,
                servers=stack.enter_context(contextlib.closing(ForkServers(limit=len(os.sched_getaffinity(0))))),
            )
            runner = Runner(search, self._config, trials, progress)
            try:
                runner.run()
            finally:
                search.save()
                self._records = search.records
                progress.end(search)
            self._grid = self._results(search, storage, runner.results)
        return self._grid

    def get_results(self) -> ResultGrid:
        """The results of the last :meth:`fit`, or of a search that was restored, as far as it has come.

        Raises:
            RuntimeError: there are none yet.
        """
        if self._grid is None and self._restored is not None:
            search = Search(self._space, self._config, self._restored, self._records)
            return self._results(search, self._restored, {})
        if self._grid is None:
            raise RuntimeError("get_results(): expected a search that has run, found none: call fit() first")
        return self._grid

    def _changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a trial's config changes in the trainer's arguments."""
        return {"train_loop_config": dict(config)} if self._of_function else dict(config)

    def _make(self, storage: Storage, trial: ActiveTrial, **replaced: Any) -> DataParallelTrainer:
        """The trainer of a trial, for a run in the directory of the search."""
        name, search = trial.record.name, os.path.basename(storage.root)
        given = self._run_config
        return self._trainer.vary(
            self._changes(trial.config),
            trial=Trial(name=name, id=f"{search}_{trial.record.number:05d}", experiment=search),
            run_config=replace(
                given,
                name=name,
                storage_path=storage.root,
                storage_filesystem=None if storage.is_local else storage.filesystem.handle,
                resume="auto",
                verbose=0,
                callbacks=copy.deepcopy(given.callbacks),
                stop=trial.stop_condition(given.stop),
            ),
            **replaced,
        )

    def _new_storage(self) -> Storage:
        """The directory of a new search."""
        given = self._run_config
        runs = runs_location(given.storage_path, given.storage_filesystem)
        kind = getattr(self._trainer.given["train_loop_per_worker"], "__name__", "search")
        if not self._of_function:
            kind = type(self._trainer).__name__
        name = given.name or f"{kind}_{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"
        return Storage(runs.filesystem, runs.path(name))

    def _store(self, storage: Storage) -> None:
        """Keeps what :meth:`restore` makes a tuner from, as far as it can be pickled."""
        parts = {}
        for name, value in (
            ("param_space", self._param_space),
            ("tune_config", self._config),
            ("run_config", replace(self._run_config, storage_filesystem=None, storage_path=None)),
        ):
            with contextlib.suppress(Exception):  # whatever a user's object may raise
                parts[name] = cloudpickle.dumps(value)
        storage.write_bytes(TUNER_FILE, pickle.dumps({"version": VERSION, "parts": parts}))

    def _results(self, search: Search, storage: Storage, found: Mapping[int, Result]) -> ResultGrid:
        results = []
        for record in search.records:
            result = found.get(record.number) or _read_result(storage, record)
            results.append(
                TrialResult(
                    metrics=result.metrics,
                    storage=result.storage,
                    error=result.error,
                    return_value=result.return_value,
                    config=search.config(record),
                    name=record.name,
                    state=record.state,
                )
            )
        return ResultGrid(
            results, metric=self._config.metric, mode=self._config.mode, path=storage.root, study=search.study
        )


def _read_result(storage: Storage, record: TrialRecord) -> Result:
    """The result of a trial that another driver has run, or that was stopped."""
    inside = Storage(storage.filesystem, storage.path(record.name), storage.limits)
    try:
        filesystem = None if storage.is_local else storage.filesystem.handle
        result = Result.from_path(inside.root, filesystem)
    except StorageError:  # it was never started
        result = Result(metrics={}, storage=inside)
    if record.state == "failed" and result.error is None:
        return replace(result, error=TrainingFailedError(record.error))
    return result


def _load(storage: Storage) -> dict[str, Any]:
    """What :meth:`Tuner._store` has kept, as far as it can be loaded here."""
    data = storage.read_bytes(TUNER_FILE)
    loaded: dict[str, Any] = {}
    if data is None:
        return loaded
    for name, part in pickle.loads(data)["parts"].items():
        with contextlib.suppress(Exception):  # whatever a user's object may raise
            loaded[name] = pickle.loads(part)
    return loaded
