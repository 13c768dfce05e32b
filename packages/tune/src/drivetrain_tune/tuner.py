"""``Tuner``: a hyperparameter search on this machine, with as many concurrent trials as its CPUs and GPUs allow."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
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
from drivetrain.plugin.callbacks import Console, Trial
from drivetrain.plugin.runtimes import ForkServers
from drivetrain.plugin.storage import RunLock, Storage, locate, open_storage, runs_location, with_short_deadline
from drivetrain.plugin.trainers import check_param_space
from drivetrain_tune.results import ResultGrid, TrialResult
from drivetrain_tune.runner import Progress, Runner, Trials
from drivetrain_tune.search import STATE_FILE, ActiveTrial, Search, TrialRecord, TuneConfig, read_records
from drivetrain_tune.space import Space

__all__ = ["Tuner"]

TUNER_FILE = "tuner.pkl"
VERSION = 1


class Tuner:
    """Runs a trainer with values from a search space, and finds the best values.

    Args:
        trainable: a trainer, or a train function, which then runs on one worker.
        param_space: the search space. For a trainer, its keys are names of the trainer's arguments, and its values are
            merged with those arguments. For a train function, it is the search space of the function's config.
        tune_config: the objective and settings of the search.
        run_config: the configuration for the run of each trial. Its values that are not the defaults replace those in
            the trainer's ``run_config``. ``name`` and ``storage_path`` apply to the directory of the search, which
            contains the run directories of the trials.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the search space contains an argument that is unknown
            or must be the same for all trials.

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
                raise ConfigurationError(f"[DT-103] Tuner({name}=...): expected a {kind.__name__}, got {value!r}")
        self._of_function = not isinstance(trainable, DataParallelTrainer)
        if isinstance(trainable, DataParallelTrainer):
            self._trainer = trainable
        elif isinstance(trainable, type) or getattr(trainable, "__module__", "").startswith("ray."):
            raise ConfigurationError(
                f"[DT-103] Tuner(trainable=...): expected a trainer or a train function, got {trainable!r}. Pass the "
                "return value of as_trainable() to ray.tune.Tuner"
            )
        else:
            self._trainer = DataParallelTrainer(trainable)
        self._param_space = dict(param_space or {})
        check_param_space(self._changes(self._param_space), self._trainer.known_arguments)
        self._space = Space(self._param_space)
        self._config = tune_config
        self._run_config = _merge(self._trainer.given.get("run_config") or RunConfig(), run_config)
        if self._run_config.resume != "never":
            raise ConfigurationError(
                f"[DT-102] Tuner(run_config=...): expected RunConfig(resume='never'), got "
                f"resume={self._run_config.resume!r}. To resume a search, call Tuner.restore(path, trainable)"
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
        """Return a tuner that resumes a search; :meth:`fit` runs the remaining trials.

        This unpickles ``tuner.pkl``, which can execute code: restore only searches that you trust.

        Args:
            path: the directory of the search.
            trainable: the trainable of the search.
            resume_unfinished: resume the trials that were still running when the search ended, each from its latest
                checkpoint. False does not run them again; their state becomes ``"stopped"``.
            resume_errored: resume the failed trials, each from its latest checkpoint.
            restart_errored: restart the failed trials from the beginning.
            param_space: the search space, which must be the same as before; only needed if the stored search space
                cannot be loaded.
            storage_filesystem: the pyarrow or fsspec filesystem of ``path``; None to determine it from the path.

        Raises:
            StorageError: there is no search in the directory.
            SerializationError: the stored arguments of the search cannot be loaded. If only the search space cannot be
                loaded, pass ``param_space``.
        """
        storage = Storage(*locate(path, storage_filesystem, what="Tuner.restore"))
        records = read_records(storage)
        stored = _load(storage)
        if param_space is None and "param_space" not in stored:
            raise SerializationError(
                f"[DT-202] {storage.path(TUNER_FILE)}: expected a param_space that this process can load, got none. "
                "Pass it to Tuner.restore(param_space=...)"
            )
        if not {"tune_config", "run_config"} <= stored.keys():
            raise SerializationError(
                f"[DT-202] {storage.path(TUNER_FILE)}: expected a tune_config and a run_config that this process can "
                f"load, got {', '.join(sorted(stored)) or 'none'}"
            )
        tuner = cls(
            trainable,
            param_space=stored.get("param_space") if param_space is None else param_space,
            tune_config=stored["tune_config"],
            run_config=stored["run_config"],
        )
        if not all(tuner._space.fits(record.drawn, record.computed) for record in records):
            raise ConfigurationError(
                f"[DT-755] Tuner.restore(param_space=...): expected the search space of the search in "
                f"{storage.root}, whose domains are {sorted(records[0].drawn)}, got one with domains "
                f"{sorted(tuner._space.domains)}"
            )
        for record in records:
            storage.inside(record.name)  # rejects a trial's directory that is a link out of the search's directory
            is_retried = record.state == "failed" and (resume_errored or restart_errored)
            if is_retried and restart_errored:
                storage.delete(record.name)
            if is_retried:
                record.state, record.error = "running", ""
            elif record.state == "running" and not resume_unfinished:
                record.state = "stopped"
            if record.state == "running":
                record.reports = {}
        tuner._records, tuner._restored = records, storage
        return tuner

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any | None = None) -> bool:
        """Return True if the directory contains a search that :meth:`restore` can resume."""
        return Storage(*locate(path, storage_filesystem, what="Tuner.can_restore")).exists(STATE_FILE)

    def fit(self) -> ResultGrid:
        """Run the trials, and wait for them.

        A trial that fails does not end the others; the error is in the result of that trial. Ctrl-C terminates all
        trials; :meth:`restore` can resume them.

        Raises:
            ConfigurationError: a trial's values are not valid for the trainer.
            PluginNotFoundError: Optuna is not installed.
            ResourceError: a trial requests more resources than exist.
            RunExistsError: a search or a run with this name exists, or the directory contains other files.
            RunInUseError: another driver is running the search.
            SerializationError: the train function or its config cannot be pickled.
            StorageError: the directory of the search cannot be written.
            KeyboardInterrupt: Ctrl-C; all workers have exited.
        """
        storage = self._restored or self._new_storage()
        console = Console()
        with contextlib.ExitStack() as stack:
            if self._restored is None:
                _require_new(with_short_deadline(storage))
            search = Search(self._space, self._config, storage, self._records if self._restored else ())
            open_storage(with_short_deadline(storage))
            stack.enter_context(RunLock(with_short_deadline(storage), partial(console.print, error=True)).acquired())
            if self._restored is None:
                _require_new(storage)  # another driver may have created a search while this one had no lock
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
        """Return the results of the last :meth:`fit`, or the stored results of a restored search before its first fit.

        Raises:
            RuntimeError: the search has not run.
        """
        if self._grid is None and self._restored is not None:
            search = Search(self._space, self._config, self._restored, self._records)
            return self._results(search, self._restored, {})
        if self._grid is None:
            raise RuntimeError("get_results(): expected a search that has run, got a new one. Call fit() first")
        return self._grid

    def _changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the trainer that a trial's config changes, with their new values."""
        return {"train_loop_config": dict(config)} if self._of_function else dict(config)

    def _make(self, storage: Storage, trial: ActiveTrial, **replaced: Any) -> DataParallelTrainer:
        """Return the trainer of a trial. The run directory of the trial is in the directory of the search."""
        name, search = trial.record.name, os.path.basename(storage.root)
        run_config = self._run_config
        return self._trainer.vary(
            self._changes(trial.config),
            trial=Trial(name=name, id=f"{search}_{trial.record.number:05d}", experiment=search),
            run_config=replace(
                run_config,
                name=name,
                storage_path=storage.root,
                storage_filesystem=None if storage.is_local else storage.filesystem.handle,
                resume="auto",
                verbose=0,
                callbacks=copy.deepcopy(run_config.callbacks),
                stop=trial.stop_condition(run_config.stop),
            ),
            **replaced,
        )

    def _new_storage(self) -> Storage:
        """Return the directory of a new search."""
        run_config = self._run_config
        runs = runs_location(run_config.storage_path, run_config.storage_filesystem)
        kind = getattr(self._trainer.given["train_loop_per_worker"], "__name__", "search")
        if not self._of_function:
            kind = type(self._trainer).__name__
        name = run_config.name or f"{kind}_{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(4)}"
        return Storage(runs.filesystem, runs.path(name))

    def _store(self, storage: Storage) -> None:
        """Store the arguments with which :meth:`restore` creates a tuner; skip those that cannot be pickled."""
        parts = {}
        for name, value in (
            ("param_space", self._param_space),
            ("tune_config", self._config),
            ("run_config", replace(self._run_config, storage_filesystem=None, storage_path=None)),
        ):
            with contextlib.suppress(Exception):  # a user's object may raise any exception
                parts[name] = cloudpickle.dumps(value)
        storage.write_bytes(TUNER_FILE, pickle.dumps({"version": VERSION, "parts": parts}))

    def _results(self, search: Search, storage: Storage, known: Mapping[int, Result]) -> ResultGrid:
        results = []
        for record in search.records:
            result = known.get(record.number) or _read_result(storage, record)
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


def _merge(of_trainer: RunConfig, given: RunConfig | None) -> RunConfig:
    """Return the configuration of a trainer's runs, with the values that the tuner's configuration sets."""
    if given is None:
        return of_trainer
    values = {each.name: getattr(given, each.name) for each in fields(given)}
    default = RunConfig()
    changed = {name: value for name, value in values.items() if value != getattr(default, name)}
    return replace(of_trainer, **{"resume": "never", **changed})


def _require_new(storage: Storage) -> None:
    """Raise an error if the directory of a new search contains anything, such as another search or a run."""
    directories, files = storage.list_names()
    if STATE_FILE in files or TUNER_FILE in files:
        raise RunExistsError(
            f"[DT-701] {storage.root}: expected no search with this name, got an existing one, which was not changed. "
            "Choose another name, delete the directory, or resume the search with Tuner.restore(path, trainable)"
        )
    if directories or any(not name.startswith(".") for name in files):  # the lock and the check of the storage
        raise RunExistsError(
            f"[DT-701] {storage.root}: expected a new or empty directory for the search, got one with other files, "
            "which was not changed. Choose another name: RunConfig(name=...)"
        )


def _read_result(storage: Storage, record: TrialRecord) -> Result:
    """Read the result of a trial that an earlier driver has run, or that was stopped, from its run directory."""
    inside = Storage(storage.filesystem, storage.path(record.name), storage.limits)
    try:
        filesystem = None if storage.is_local else storage.filesystem.handle
        result = Result.from_path(inside.root, filesystem)
    except StorageError:  # the trial was never started
        result = Result(metrics={}, storage=inside)
    if record.state == "failed" and result.error is None:
        return replace(result, error=TrainingFailedError(record.error))
    return result


def _load(storage: Storage) -> dict[str, Any]:
    """Return the arguments that :meth:`Tuner._store` has stored; skip those that this process cannot load."""
    data = storage.read_bytes(TUNER_FILE)
    loaded: dict[str, Any] = {}
    if data is None:
        return loaded
    for name, part in pickle.loads(data)["parts"].items():
        with contextlib.suppress(Exception):  # a user's object may raise any exception
            loaded[name] = pickle.loads(part)
    return loaded
