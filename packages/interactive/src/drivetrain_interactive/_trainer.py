"""``Trainer``: a group of workers that is kept between runs."""

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
from typing import TYPE_CHECKING, Any, Literal

from drivetrain import (
    Callback,
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    ScalingConfig,
    SessionError,
)
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.datasets import required_runtime
from drivetrain.plugin.drivers import RetryBudget, as_table
from drivetrain.plugin.sessions import Interrupts
from drivetrain.plugin.storage import Storage, checkpoint_in, delete_checkpoints, runs_location
from drivetrain.plugin.trainers import resolve_backend, trainable_of
from drivetrain_interactive import _dicts
from drivetrain_interactive._iterator import Feed, TrainingIterator
from drivetrain_interactive._latest import LatestRun, as_path, filesystem_of
from drivetrain_interactive._warm import WarmRuntime

if TYPE_CHECKING:
    from drivetrain.plugin import Failure, Run, Runtime
    from drivetrain.plugin.trainers import ConfigT, TrainFunction

__all__ = ["CheckpointStrategy", "InteractiveRun", "Trainer"]

CheckpointLike = Mapping[str, Any] | Checkpoint | str | os.PathLike[str] | None

_RUN = re.compile(r"run_(\d+)")
_DATASET = "train"


@dataclass(frozen=True, slots=True)
class CheckpointStrategy:
    """The rules for keeping checkpoints in runs of a :class:`Trainer`.

    Attributes:
        num_to_keep: the number of best checkpoints to keep; None keeps all. The latest checkpoint is kept as well. With
            0, only the latest checkpoint is kept, for retries, and it is deleted when the run ends. Its values are then
            kept in memory, as :attr:`Trainer.latest_checkpoint`.
        checkpoint_score_attribute: the score of a checkpoint: a number passed to ``save_checkpoint(...)``, or a metric
            reported with the checkpoint; None ranks checkpoints by recency.
        checkpoint_score_order: ``"max"`` if larger scores are better, ``"min"`` if smaller scores are better.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        self.config  # noqa: B018 - creating it validates the values

    @property
    def config(self) -> CheckpointConfig:
        """These rules as a part of the run's configuration."""
        return CheckpointConfig(
            num_to_keep=1 if self.num_to_keep == 0 else self.num_to_keep,
            checkpoint_score_attribute=self.checkpoint_score_attribute,
            checkpoint_score_order=self.checkpoint_score_order,
        )


class Trainer:
    """A group of workers that is kept between runs, so that the next run starts in milliseconds.

    Each call of :meth:`run` is a separate run with its own directory, metrics files and checkpoints, as with
    :class:`~drivetrain.DataParallelTrainer`. The worker processes are reused as long as every run succeeds, so imported
    modules and GPU contexts remain loaded. After a failure or an interrupt, or when the file of an imported module or
    the driver's environment has changed, the next run gets new processes.

    Args:
        backend: sets up the framework: the name of an installed backend such as ``"torch"``, a configuration such as
            ``TorchConfig()``, or ``"none"``.
        num_workers: the number of worker processes; 0 runs train functions in this process.
        use_gpu: assign a GPU to each worker.
        resources_per_worker: the resources of one worker, such as ``{"CPU": 4}``.
        logdir: the directory that contains the run directories: an absolute path, a URI, or a path relative to
            ``DRIVETRAIN_STORAGE_PATH``, which is ``~/drivetrain_results`` if the variable is not set. None creates a
            new directory in ``DRIVETRAIN_STORAGE_PATH``.
        max_retries: how many times a run is retried from its latest checkpoint after losing a worker; -1 for no limit.
            A run whose train function raises an exception is not retried.
        runtime: ``"local"`` or ``"ray"``; None selects automatically, see :class:`~drivetrain.ScalingConfig`.
        run_config: other settings of the runs, such as ``RunConfig(hang_timeout_s=60)``.

    Raises:
        ConfigurationError: an argument has the wrong type or is out of range.
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
                f"[DT-101] Trainer(num_workers=...): expected a number, got {num_workers!r}. For elastic runs, use "
                "DataParallelTrainer or a subclass"
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
        self._call_lock = threading.Lock()
        self._close_iterator: Callable[[], object] = lambda: None
        self._latest: LatestRun | None = None

    def _repr_html_(self) -> str:
        rows = {
            "backend": self._backend.name,
            "runs": self.logdir,
            "latest run": self.latest_run_dir or "none yet",
            "workers": "started" if self._warm is not None else "not started",
        }
        return as_table("Trainer", rows) + self._scaling._repr_html_()

    def __enter__(self) -> Trainer:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def start(self) -> None:
        """Start the workers. If this method is not called, the first run starts them.

        Raises:
            ResourceError: the workers require more resources than exist, or than become free in time.
            PluginError: the runtime is not installed.
            WorkerDiedError: a worker died during its start.
            WaitTimeoutError: the workers did not start in time.
        """
        from drivetrain.plugin.drivers import group_spec  # imported here, because every worker imports this module

        interrupts = Interrupts()
        try:
            with self._exclusive(), interrupts.from_signals():
                scaling = self._ready(required=None)
                assert self._warm is not None
                self._warm.validate(scaling)
                if scaling.max_workers:
                    with self._warm.launch(group_spec(self._config, scaling, self._backend, interrupts)):
                        pass
        finally:
            interrupts.close()

    def shutdown(self) -> None:
        """Terminate the workers, and cancel the run of an iterator. The next run starts new workers."""
        with self._exclusive():
            self._close()
            self._warm = None

    def run(
        self,
        train_func: TrainFunction[ConfigT],
        config: ConfigT | None = None,
        callbacks: Sequence[Callback | str] | None = None,
        dataset: Any = None,
        checkpoint: CheckpointLike = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> list[Any]:
        """Run a function on every worker, and wait until it has returned.

        Args:
            train_func: the function; it takes no argument, or the config.
            config: the config that is passed to the function: a dict, or an object of a dataclass.
            callbacks: :class:`~drivetrain_interactive.TrainingCallback` or :class:`~drivetrain.Callback` objects, or
                names of installed callbacks.
            dataset: the dataset whose shards ``get_dataset_shard()`` returns, or a mapping from names to datasets; see
                :class:`~drivetrain.DataParallelTrainer` for the supported types.
            checkpoint: the checkpoint that ``load_checkpoint()`` returns at the start: a dict, a checkpoint, or the
                path of a checkpoint.
            checkpoint_strategy: the rules for keeping checkpoints; None for the rules in the trainer's ``run_config``,
                which keep all checkpoints by default.

        Returns:
            The return values of the function, by rank.

        Raises:
            TrainingFailedError: a worker or a callback failed and no retry was left; ``__cause__`` is the root cause.
            ConfigurationError: an argument is invalid; nothing was started.
            SerializationError: the function or its config cannot be pickled; nothing was started.
            KeyboardInterrupt: Ctrl-C, or an interrupt of the notebook kernel; the run has ended.
            DrivetrainError: other errors of :meth:`~drivetrain.DataParallelTrainer.fit`.
        """
        arguments = train_func, config, callbacks or (), dataset, checkpoint, checkpoint_strategy
        with self._exclusive(), self._prepared(*arguments) as run:
            result = self._keep(run.fit())
        values: list[Any] = result.return_value
        return values

    def run_iterator(
        self,
        train_func: TrainFunction[ConfigT],
        config: ConfigT | None = None,
        dataset: Any = None,
        checkpoint: CheckpointLike = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> TrainingIterator:
        """Run a function like :meth:`run`, but return an iterator over its reports.

        Args:
            train_func: see :meth:`run`.
            config: see :meth:`run`.
            dataset: see :meth:`run`.
            checkpoint: see :meth:`run`.
            checkpoint_strategy: see :meth:`run`.

        Returns:
            An iterator over the metrics of every rank for each iteration. The next run of the trainer cancels it.

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
        with self._exclusive(), contextlib.ExitStack() as preparation:
            run = preparation.enter_context(self._prepared(*arguments))
            afterwards = preparation.pop_all()

            def fit(interrupts: Interrupts) -> Result:
                with afterwards:
                    return self._keep(run.fit_until(interrupts))

            iterator = TrainingIterator(fit, feed)
            self._close_iterator = iterator.close  # does not keep a reference to the iterator
            return iterator

    def to_tune_trainable(
        self, train_func: TrainFunction[Any], dataset: Any = None
    ) -> Callable[[dict[str, Any]], None]:
        """Return a trainable that ``ray.tune.run`` and ``ray.tune.Tuner`` can run with different configs.

        Each trial is a run with its own workers, as many as this trainer has. The config of the trial is passed to the
        function. Reports and ``save_checkpoint()`` are passed to Ray Tune, but return values are not. Requires
        ``pip install "drivetrain[ray-tune]"``.

        Args:
            train_func: see :meth:`run`.
            dataset: see :meth:`run`.

        Raises:
            PluginNotFoundError: Ray Tune is not installed.
            SerializationError: the function or the dataset cannot be pickled.

        Example:
            Find the best of three inputs::

                from ray import tune

                trainable = trainer.to_tune_trainable(train_func)
                analysis = tune.run(trainable, config={"input": tune.grid_search([1, 2, 3])})
                print(analysis.get_best_config(metric="output", mode="max"))
        """
        trainer = DataParallelTrainer(
            train_func,
            backend_config=self._backend,
            scaling_config=self._scaling,
            run_config=replace(self._config, failure_config=self._failures),
            datasets=_by_name(dataset),
        )
        return trainable_of(trainer, argument="train_loop_config")

    @property
    def logdir(self) -> Path | str:
        """The directory that contains the run directories; a path on the storage filesystem if that is not local."""
        return as_path(self._logs)

    @property
    def latest_run_dir(self) -> Path | str | None:
        """The directory of the latest run; None before the first run."""
        return None if self._latest is None else as_path(self._latest.storage)

    @property
    def latest_checkpoint_dir(self) -> Path | str | None:
        """The directory that contains the latest run's checkpoints: the run directory; None before the first run."""
        return self.latest_run_dir

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The values of the last ``save_checkpoint()`` in the latest run; None if there is none.

        This unpickles the checkpoint, which a run of this trainer has written.

        Raises:
            CheckpointError: the last checkpoint was not saved by ``save_checkpoint()``, but by ``report()``.
        """
        return None if self._latest is None else self._latest.load_checkpoint()

    @property
    def best_checkpoint_path(self) -> Path | str | None:
        """The directory of the best checkpoint of the latest run; None if there is no checkpoint.

        If the run's rules define no score, the best checkpoint is the latest checkpoint.
        """
        return None if self._latest is None else self._latest.best_checkpoint_path()

    @property
    def latest_result(self) -> Result | None:
        """The result of the latest run, even if it is still running or has failed; None before the first run."""
        return None if self._latest is None else self._latest.load_result()

    def _keep(self, result: Result) -> Result:
        """Store the result of the latest run, which has succeeded."""
        assert self._latest is not None
        self._latest.result = result
        return result

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Ensure that only one call is active, and cancel the run of an earlier iterator."""
        if not self._call_lock.acquire(blocking=False):
            raise SessionError(
                "[DT-808] Trainer: expected one call at a time, got a call while a function is running. Use "
                "another Trainer"
            )
        try:
            self._close_iterator()
            self._close_iterator = lambda: None
            yield
        finally:
            self._call_lock.release()

    def _ready(self, *, required: str | None) -> ScalingConfig:
        """Return the scaling configuration of a run, with the runtime that keeps the workers.

        Args:
            required: the name of the runtime that the run's datasets require; None if every runtime can read them.
        """
        # imported here, because every worker imports this module
        from drivetrain.plugin.drivers import require_process_state, resolve_runtime

        if self._warm is None:
            require_process_state(self._scaling.max_workers)
            self._warm = WarmRuntime(resolve_runtime(self._scaling, required=required))
            self._close = weakref.finalize(self, self._warm.close)
        return replace(self._scaling, runtime=self._warm)

    @contextlib.contextmanager
    def _prepared(
        self,
        train_func: TrainFunction[ConfigT],
        config: ConfigT | None,
        callbacks: Sequence[Callback | str],
        dataset: Any,
        checkpoint: CheckpointLike,
        strategy: CheckpointStrategy | None,
    ) -> Iterator[InteractiveRun]:
        """Yield a run that is ready to start. Afterwards, delete those of its files that must not stay in storage."""
        datasets = _by_name(dataset)
        numbers = [int(match[1]) for name in self._logs.list_names()[0] if (match := _RUN.fullmatch(name))]
        name = f"run_{max(numbers, default=0) + 1:03d}"
        rules = self._config.checkpoint_config if strategy is None else strategy.config

        def begin() -> None:
            self._latest = LatestRun(Storage(self._logs.filesystem, self._logs.path(name)), rules)

        with contextlib.ExitStack() as afterwards:
            if isinstance(checkpoint, Mapping):
                given = f".{name}"
                afterwards.callback(self._logs.delete, given)
                self._logs.write_bytes(f"{given}/{_dicts.DICT_FILE}", _dicts.dump(checkpoint))
                checkpoint = checkpoint_in(self._logs, given)
            elif isinstance(checkpoint, (str, os.PathLike)):
                checkpoint = Checkpoint(checkpoint)
            if strategy is not None and strategy.num_to_keep == 0:
                afterwards.callback(self._unstore_checkpoints, name)
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
                    callbacks=(*self._config.callbacks, *callbacks, _OnRunStart(begin)),
                    checkpoint_config=rules,
                    failure_config=self._failures,
                ),
                datasets=datasets,
                resume_from_checkpoint=checkpoint,
            )

    def _unstore_checkpoints(self, name: str) -> None:
        """Keep the values of the latest checkpoint of a run in memory, and delete its checkpoints."""
        storage = Storage(self._logs.filesystem, self._logs.path(name))
        if self._latest is None or self._latest.storage.root != storage.root:  # the run was rejected before it started
            return
        with contextlib.suppress(CheckpointError):  # the checkpoint is not a dict
            self._latest.in_memory_values = self._latest.load_checkpoint()
        delete_checkpoints(storage)


class InteractiveRun(DataParallelTrainer):
    """A run of a :class:`Trainer`. Its result contains the return values of all ranks."""

    _all_values = True

    def fit_until(self, interrupts: Interrupts) -> Result:
        """Run like :meth:`fit`, but end the run when ``interrupts`` requests it, instead of on signals."""
        return self._run(interrupts, raise_on_failure=True)


class _OnRunStart(Callback):
    """Calls a function of the trainer when the directory of a run exists."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def on_run_start(self, run: Run) -> None:
        self._begin()


class _RetryLostWorkers(RetryBudget):
    """Retries a run after failures that may not recur, but not after exceptions of the train function."""

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        return failure.kind is not FailureKind.USER_ERROR and super().decide(failure, history)


def _by_name(dataset: Any) -> dict[str, Any]:
    if dataset is None:
        return {}
    return dict(dataset) if isinstance(dataset, Mapping) else {_DATASET: dataset}


def _check_run_config(config: RunConfig) -> None:
    default = RunConfig()
    for name in ("name", "storage_path", "resume"):
        if getattr(config, name) != getattr(default, name):
            raise ConfigurationError(
                f"[DT-102] Trainer(run_config=...): expected a RunConfig without {name}, got "
                f"{getattr(config, name)!r}. Pass logdir=... instead: each run gets a new directory in it"
            )


def _locate_logs(logdir: str | os.PathLike[str] | None, filesystem: Any | None) -> Storage:
    """Return the directory that contains the runs of a trainer."""
    where = os.fspath(logdir or f"train_{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(4)}")
    if "://" in where or where.startswith(("/", "~")) or filesystem is not None:
        return runs_location(where, filesystem)
    runs = runs_location(None)
    return Storage(runs.filesystem, runs.path(where))
