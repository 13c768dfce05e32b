"""``Trainer``: workers that stay, for function after function."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain._base.interrupts import Interrupts
from drivetrain._base.notebook import as_table
from drivetrain._driver.arguments import resolve_backend
from drivetrain._driver.result import Result
from drivetrain._driver.trainer import DataParallelTrainer, trainable_of
from drivetrain._hooks.backend import Backend, BackendConfig
from drivetrain._hooks.callback import Callback
from drivetrain._hooks.policy import RetryBudget
from drivetrain._hooks.providers import required_runtime
from drivetrain._storage.checkpoint import Checkpoint, checkpoint_in
from drivetrain._storage.directory import Storage, runs_location
from drivetrain._storage.manifest import delete_checkpoints
from drivetrain.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain.errors import CheckpointError, ConfigurationError, FailureKind, SessionError
from drivetrain.interactive import dicts
from drivetrain.interactive.iterator import Feed, TrainingIterator
from drivetrain.interactive.latest import LatestRun, as_path, filesystem_of
from drivetrain.interactive.warm import WarmRuntime

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain._hooks.context import Run
    from drivetrain._runtimes.base import Runtime

__all__ = ["CheckpointStrategy", "InteractiveRun", "Trainer"]

TrainFunction = Callable[[], Any] | Callable[[dict[str, Any]], Any]
CheckpointLike = Mapping[str, Any] | Checkpoint | str | os.PathLike[str] | None

_RUN = re.compile(r"run_(\d+)")
_DATASET = "train"


@dataclass(frozen=True, slots=True)
class CheckpointStrategy:
    """Which checkpoints of a run are kept, in the words of :class:`Trainer`.

    Attributes:
        num_to_keep: how many, the best ones; the latest is always kept, and None keeps all. With 0 the latest is kept
            while the run goes on, for its retries, and none after it: :attr:`Trainer.latest_checkpoint` has its values.
        checkpoint_score_attribute: what ranks them: a number of ``save_checkpoint(...)``, or a metric that was reported
            with the checkpoint; None ranks by recency.
        checkpoint_score_order: ``"max"`` or ``"min"``: which end of it is better.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        self.config  # noqa: B018 - which validates

    @property
    def config(self) -> CheckpointConfig:
        """What it is to the run."""
        return CheckpointConfig(
            num_to_keep=1 if self.num_to_keep == 0 else self.num_to_keep,
            checkpoint_score_attribute=self.checkpoint_score_attribute,
            checkpoint_score_order=self.checkpoint_score_order,
        )


class Trainer:
    """A group of workers that stays between runs, so that the next one begins in milliseconds.

    Each call of :meth:`run` is a run of its own, with a directory, metrics files and checkpoints, as of
    :class:`~drivetrain.DataParallelTrainer`. The worker processes are the same ones as long as every run returns:
    modules that were imported, and a GPU's context, are still there. After a failure or an interrupt, or when a file
    that was imported or the driver's environment has changed, the next run gets fresh ones.

    Args:
        backend: what sets the framework up: the name of an installed backend such as ``"torch"``, a configuration such
            as ``TorchConfig()``, or ``"none"``.
        num_workers: worker processes; 0 runs functions in this process.
        use_gpu: give each worker a GPU.
        resources_per_worker: resources of one worker, such as ``{"CPU": 4}``.
        logdir: where the runs' directories go: an absolute path, a URI, or a path relative to
            ``DRIVETRAIN_STORAGE_PATH``, by default ``~/drivetrain_results``. None makes a directory in there.
        max_retries: how many times a run starts again from its latest checkpoint after a worker was lost; -1 for
            without limit. An exception of the train function is not retried.
        runtime: ``"local"`` or ``"ray"``; None picks, see :class:`~drivetrain.ScalingConfig`.
        run_config: everything else about runs, such as ``RunConfig(hang_timeout_s=60)``.

    Raises:
        ConfigurationError: an argument is of the wrong type or out of range.
        PluginError: the backend is not installed, or does not load.

    Example:
        >>> def train_func(config):
        ...     return [epoch for epoch in range(config["epochs"])]
        >>> with Trainer("none", num_workers=2) as trainer:
        ...     trainer.run(train_func, config={"epochs": 2})
        ...     trainer.run(train_func, config={"epochs": 3})
        [[0, 1], [0, 1]]
        [[0, 1, 2], [0, 1, 2]]
    """

    def __init__(
        self,
        backend: str | BackendConfig | Backend,
        num_workers: int,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | os.PathLike[str] | None = None,
        max_retries: int = 3,
        *,
        runtime: str | Runtime | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        size: object = num_workers
        if isinstance(size, (tuple, list)):
            raise ConfigurationError(
                f"Trainer(num_workers=...): expected a number, got {num_workers!r}: elastic runs are for "
                "DataParallelTrainer and what derives from it"
            )
        self._scaling = ScalingConfig(
            num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources_per_worker, runtime=runtime
        )
        self._config = run_config or RunConfig(verbose=0)
        _check_run_config(self._config)
        self._failures = replace(
            self._config.failure_config,
            fail_fast=False,
            max_failures=max_retries,
            policy=self._config.failure_config.policy or _RetryLostWorkers(FailureConfig(max_failures=max_retries)),
        )
        self._backend = resolve_backend(backend)
        self._logs = _locate_logs(logdir, self._config.storage_filesystem)
        self._warm: WarmRuntime | None = None
        self._close: Callable[[], object] = lambda: None
        self._turn = threading.Lock()
        self._end_iterated: Callable[[], object] = lambda: None
        self._latest: LatestRun | None = None

    def _repr_html_(self) -> str:
        rows = {
            "backend": self._backend.name,
            "runs": self.logdir,
            "latest run": self.latest_run_dir or "none yet",
            "workers": "up" if self._warm is not None else "not started",
        }
        return as_table("Trainer", rows) + self._scaling._repr_html_()

    def __enter__(self) -> Trainer:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def start(self) -> None:
        """Starts the workers, so that the first run finds them ready; :meth:`run` does it otherwise.

        Raises:
            ResourceError: more is asked for than exists, or becomes free in time.
            PluginError: the runtime is not installed.
            WorkerDiedError: a worker ended while it was being started.
            WaitTimeoutError: the workers did not start in time.
        """
        from drivetrain._driver.controller import group_spec  # not with this module, which every worker imports

        interrupts = Interrupts()
        try:
            with self._in_turn(), interrupts.from_signals():
                scaling = self._ready(required=None)
                assert self._warm is not None
                self._warm.validate(scaling)
                if scaling.max_workers:
                    with self._warm.launch(group_spec(self._config, scaling, self._backend, interrupts)):
                        pass
        finally:
            interrupts.close()

    def shutdown(self) -> None:
        """Ends the workers; a later :meth:`start` or :meth:`run` has new ones. A run that is iterated is cancelled."""
        with self._in_turn():
            self._close()
            self._warm = None

    def run(
        self,
        train_func: TrainFunction,
        config: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback | str] | None = None,
        dataset: Any = None,
        checkpoint: CheckpointLike = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> list[Any]:
        """Runs a function on every worker, and waits for its end.

        Args:
            train_func: the function; it takes no argument, or the config.
            config: what to pass to it.
            callbacks: :class:`~drivetrain.TrainingCallback` or :class:`~drivetrain.Callback` objects, or names of
                installed ones.
            dataset: what workers get a part of with ``get_dataset_shard()``, or a mapping from names to such; see
                :class:`~drivetrain.DataParallelTrainer` for what a dataset may be.
            checkpoint: what ``load_checkpoint()`` returns at the start: a dict, or a checkpoint or the path of one.
            checkpoint_strategy: which checkpoints are kept; all by default.

        Returns:
            What the function has returned, by rank.

        Raises:
            TrainingFailedError: a worker or a callback failed and no retry was left; ``__cause__`` is the root cause.
            ConfigurationError: an argument is not as described; nothing was started.
            SerializationError: the function or its config cannot be pickled; nothing was started.
            KeyboardInterrupt: Ctrl-C, or the kernel's interrupt; the run has ended, and the next one can begin.
            DrivetrainError: whatever else :meth:`~drivetrain.DataParallelTrainer.fit` raises.
        """
        arguments = train_func, config, callbacks or (), dataset, checkpoint, checkpoint_strategy
        with self._in_turn(), self._prepared(*arguments) as run:
            result = self._keep(run.fit())
        values: list[Any] = result.return_value
        return values

    def run_iterator(
        self,
        train_func: TrainFunction,
        config: Mapping[str, Any] | None = None,
        dataset: Any = None,
        checkpoint: CheckpointLike = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> TrainingIterator:
        """Like :meth:`run`, but the reports are yours to handle: an iterator over them.

        Args:
            train_func: see :meth:`run`.
            config: see :meth:`run`.
            dataset: see :meth:`run`.
            checkpoint: see :meth:`run`.
            checkpoint_strategy: see :meth:`run`.

        Returns:
            For each iteration, the metrics of every rank. Another run of the trainer cancels it.

        Example:
            >>> from drivetrain import report
            >>> trainer = Trainer("none", num_workers=2)
            >>> for results in trainer.run_iterator(lambda: report(loss=0.5)):
            ...     print([result["loss"] for result in results])
            [0.5, 0.5]
            >>> trainer.shutdown()
        """
        feed = Feed()
        arguments = train_func, config, (feed,), dataset, checkpoint, checkpoint_strategy
        with self._in_turn(), contextlib.ExitStack() as preparation:
            run = preparation.enter_context(self._prepared(*arguments))
            afterwards = preparation.pop_all()

            def fit(interrupts: Interrupts) -> Result:
                with afterwards:
                    return self._keep(run.fit_until(interrupts))

            iterator = TrainingIterator(fit, feed)
            self._end_iterated = iterator.close  # which does not hold the iterator
            return iterator

    def to_tune_trainable(self, train_func: TrainFunction, dataset: Any = None) -> Callable[[dict[str, Any]], None]:
        """What ``ray.tune.run`` and ``ray.tune.Tuner`` take to try a function with other configs.

        Each trial is a run with as many workers as this trainer has, which are its own. Its config is what the function
        gets. Reports and ``save_checkpoint()`` reach Ray Tune; what the function returns does not. Needs
        ``pip install "drivetrain[ray-tune]"``.

        Args:
            train_func: see :meth:`run`.
            dataset: see :meth:`run`.

        Raises:
            PluginNotFoundError: Ray Tune is not installed.
            SerializationError: the function or the dataset cannot be sent to a trial.

        Example:
            The best of three inputs::

                from ray import tune

                trainable = trainer.to_tune_trainable(train_func)
                analysis = tune.run(trainable, config={"input": tune.grid_search([1, 2, 3])})
                print(analysis.get_best_config(metric="output", mode="max"))
        """
        made = DataParallelTrainer(
            train_func,
            backend_config=self._backend,
            scaling_config=self._scaling,
            run_config=replace(self._config, failure_config=self._failures),
            datasets=_by_name(dataset),
        )
        return trainable_of(made, argument="train_loop_config")

    @property
    def logdir(self) -> Path | str:
        """The directory that the runs' are in; a path on its filesystem where that is not this machine's."""
        return as_path(self._logs)

    @property
    def latest_run_dir(self) -> Path | str | None:
        """The directory of the latest run; None before the first."""
        return None if self._latest is None else as_path(self._latest.storage)

    @property
    def latest_checkpoint_dir(self) -> Path | str | None:
        """The directory that the latest run's checkpoints are in, which is the run's own; None before the first."""
        return self.latest_run_dir

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The values of the latest run's last ``save_checkpoint()``; None without any.

        This unpickles the checkpoint, which the trainer's own run has written.

        Raises:
            CheckpointError: it is a directory that :func:`~drivetrain.report` was given.
        """
        return None if self._latest is None else self._latest.load_checkpoint()

    @property
    def best_checkpoint_path(self) -> Path | str | None:
        """The directory of the latest run's best checkpoint by its strategy, the most recent one by default."""
        return None if self._latest is None else self._latest.best_checkpoint_path()

    @property
    def latest_result(self) -> Result | None:
        """The latest run's metrics and checkpoints, also while it goes on or if it failed; None before the first."""
        return None if self._latest is None else self._latest.load_result()

    def _keep(self, result: Result) -> Result:
        """Keeps the result of a run that has succeeded, which is the latest one."""
        assert self._latest is not None
        self._latest.result = result
        return result

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """For the time of one call; ends a run that is still being iterated."""
        if not self._turn.acquire(blocking=False):
            raise SessionError("a Trainer runs one function at a time, got another call that has not returned")
        try:
            self._end_iterated()
            self._end_iterated = lambda: None
            yield
        finally:
            self._turn.release()

    def _ready(self, *, required: str | None) -> ScalingConfig:
        """The scaling of a run, on the runtime that keeps the workers."""
        from drivetrain._driver.launch import resolve_runtime  # not with this module, which every worker imports

        if self._warm is None:
            self._warm = WarmRuntime(resolve_runtime(self._scaling, required=required))
            self._close = weakref.finalize(self, self._warm.close)
        return replace(self._scaling, runtime=self._warm)

    @contextlib.contextmanager
    def _prepared(
        self,
        train_func: TrainFunction,
        config: Mapping[str, Any] | None,
        callbacks: Sequence[Callback | str],
        dataset: Any,
        checkpoint: CheckpointLike,
        strategy: CheckpointStrategy | None,
    ) -> Iterator[InteractiveRun]:
        """A run that can begin; what it is not to leave on storage is deleted after it."""
        datasets = _by_name(dataset)
        numbers = [int(found[1]) for name in self._logs.list_names()[0] if (found := _RUN.fullmatch(name))]
        name = f"run_{max(numbers, default=0) + 1:03d}"
        rules = self._config.checkpoint_config if strategy is None else strategy.config

        def begin() -> None:
            self._latest = LatestRun(Storage(self._logs.filesystem, self._logs.path(name)), rules)

        with contextlib.ExitStack() as afterwards:
            if isinstance(checkpoint, Mapping):
                given = f".{name}"
                afterwards.callback(self._logs.delete, given)
                self._logs.write_bytes(f"{given}/{dicts.DICT_FILE}", dicts.dump(checkpoint))
                checkpoint = checkpoint_in(self._logs, given)
            elif isinstance(checkpoint, (str, os.PathLike)):
                checkpoint = Checkpoint(checkpoint)
            if strategy is not None and strategy.num_to_keep == 0:
                afterwards.callback(self._take_from_storage, name)
            yield InteractiveRun(
                train_func,
                train_loop_config=config,
                backend_config=self._backend,
                scaling_config=self._ready(required=required_runtime(datasets)),
                run_config=replace(
                    self._config,
                    name=name,
                    storage_path=self._logs.root,
                    storage_filesystem=filesystem_of(self._logs),
                    callbacks=(*self._config.callbacks, *callbacks, _Beginning(begin)),
                    checkpoint_config=rules,
                    failure_config=self._failures,
                ),
                datasets=datasets,
                resume_from_checkpoint=checkpoint,
            )

    def _take_from_storage(self, name: str) -> None:
        """Remembers the values of a run's latest checkpoint, and deletes its checkpoints."""
        storage = Storage(self._logs.filesystem, self._logs.path(name))
        if self._latest is None or self._latest.storage.root != storage.root:  # the run was refused
            return
        with contextlib.suppress(CheckpointError):  # the checkpoint is not a dict
            self._latest.unstored = self._latest.load_checkpoint()
        delete_checkpoints(storage)


class InteractiveRun(DataParallelTrainer):
    """A run of a :class:`Trainer`."""

    _all_values = True

    def fit_until(self, interrupts: Interrupts) -> Result:
        """Like :meth:`fit`, ended by what it is given."""
        return self._run(interrupts, raise_on_failure=True)


class _Beginning(Callback):
    """Tells the trainer that a run has its directory."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def on_run_start(self, run: Run) -> None:
        self._begin()


class _RetryLostWorkers(RetryBudget):
    """Retries what can go well the next time: an exception of the train function comes again."""

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        return failure.kind is not FailureKind.USER_ERROR and super().decide(failure, history)


def _by_name(dataset: Any) -> dict[str, Any]:
    if dataset is None:
        return {}
    return dict(dataset) if isinstance(dataset, Mapping) else {_DATASET: dataset}


def _check_run_config(config: RunConfig) -> None:
    usual = RunConfig()
    for name in ("name", "storage_path", "resume"):
        if getattr(config, name) != getattr(usual, name):
            raise ConfigurationError(
                f"Trainer(run_config=...): expected a RunConfig without {name}, got {getattr(config, name)!r}: "
                "each run "
                "has a new directory in logdir"
            )


def _locate_logs(logdir: str | os.PathLike[str] | None, filesystem: Any | None) -> Storage:
    """The directory that a trainer's runs are kept in."""
    where = os.fspath(logdir or f"train_{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}")
    if "://" in where or where.startswith(("/", "~")) or filesystem is not None:
        return runs_location(where, filesystem)
    runs = runs_location(None)
    return Storage(runs.filesystem, runs.path(where))
