"""``DataParallelTrainer``: runs a train function on a group of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain._base.failure import without_internal_frames
from drivetrain._base.interrupts import Interrupts
from drivetrain._base.notebook import as_table
from drivetrain._driver.arguments import (
    ConfigT,
    KeepsArguments,
    TrainFunction,
    check_param_space,
    merge_arguments,
    name_of_function,
    resolve_backend,
)
from drivetrain._driver.functions import check_function, copy_config
from drivetrain._driver.handle import RunHandle
from drivetrain._driver.job import TrainingJob
from drivetrain._driver.result import Result
from drivetrain._driver.trainerfile import TrainerFile
from drivetrain._hooks.backend import Backend, BackendConfig
from drivetrain._hooks.context import Trial
from drivetrain._plugins.data_config import DataConfig
from drivetrain._plugins.loading import load_plugin, load_single_plugin
from drivetrain._storage.checkpoint import Checkpoint, metadata_json
from drivetrain.config import CheckpointConfig, RunConfig, ScalingConfig
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DataParallelTrainer"]

_GIVEN_TWICE = "got multiple values for keyword argument 'run_config'"

_VARIADIC = "*"
"""The name under which ``trainer.pkl`` contains the values of ``*args``."""


class DataParallelTrainer(KeepsArguments):
    """Runs one function on every worker of a group.

    A trainer for a specific backend is a subclass with its own constructor, which passes ``backend_config`` and all
    other arguments to this one. :meth:`restore` and :meth:`vary` call it with the arguments that it has received.

    Args:
        train_loop_per_worker: the train function, which takes either no argument or the config.
        train_loop_config: the config that is passed to the train function: a dict (or a ``TypedDict``), or an object of
            a dataclass. Type checkers report a config that the train function does not take.
        backend_config: the backend that sets up the framework around the train function: a ``BackendConfig``, a
            ``Backend``, or the name of an installed backend such as ``"torch"``; None for no framework.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, how progress is shown, and when the run ends.
        datasets: datasets by name; :func:`~drivetrain.get_dataset_shard` returns each worker's shard. A dataset is a
            path to Parquet, CSV, JSON or Arrow files (or a list of paths), a pandas or polars data frame, a pyarrow
            table or dataset, a Hugging Face or Ray dataset, a dict of arrays, or a function that returns one of these.
        dataset_config: which datasets are split, and how.
        metadata: values by name, which ``get_context().get_metadata()`` and ``get_metadata()`` of every checkpoint
            return. They must be JSON values or bytes.
        resume_from_checkpoint: the checkpoint that ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the train function requires other arguments.
        PluginError: the backend is not installed, or cannot be loaded.

    Example:
        >>> import drivetrain
        >>> def train_func(config):
        ...     for epoch in range(config["epochs"]):
        ...         drivetrain.report({"epoch": epoch})
        >>> trainer = DataParallelTrainer(
        ...     train_func,
        ...     train_loop_config={"epochs": 3},
        ...     scaling_config=ScalingConfig(num_workers=2),
        ...     run_config=RunConfig(verbose=0),
        ... )
        >>> trainer.fit().metrics["epoch"]
        2
    """

    _all_values: ClassVar[bool] = False  # if True, Result.return_value is a list of the values of all ranks
    _trial: Trial | None = None

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT],
        *,
        train_loop_config: ConfigT | None = None,
        backend_config: BackendConfig | Backend | str | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        check_function(train_loop_per_worker)
        config = copy_config(train_loop_config)
        _check_optional("scaling_config", scaling_config, ScalingConfig)
        _check_optional("run_config", run_config, RunConfig)
        _check_optional("datasets", datasets, Mapping)
        _check_optional("dataset_config", dataset_config, DataConfig)
        _check_optional("metadata", metadata, Mapping)
        _check_optional("resume_from_checkpoint", resume_from_checkpoint, Checkpoint)
        try:
            metadata_json(dict(metadata or {}))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"[DT-107] metadata: expected JSON values or bytes: {error}") from error
        self._job = TrainingJob(
            function=train_loop_per_worker,
            config=config,
            backend=resolve_backend(BackendConfig() if backend_config is None else backend_config),
            scaling=scaling_config or ScalingConfig(),
            run_config=run_config or RunConfig(),
            datasets=dict(datasets or {}),
            data_config=dataset_config or DataConfig(),
            metadata=dict(metadata or {}),
            resume_from=resume_from_checkpoint,
            trainer=type(self).__name__,
            all_values=self._all_values,
        )
        _check_checkpoint_rules(self._job.run_config.checkpoint_config)

    def _repr_html_(self) -> str:
        job, facts = self._job, self._job.facts()
        rows = {
            "train function": facts["train_function"],
            "config": facts["train_loop_config"],
            "backend": type(job.backend).__name__,
            "datasets": ", ".join(job.datasets) or "none",
        }
        configs = (job.scaling, job.run_config, job.run_config.failure_config, job.run_config.checkpoint_config)
        return as_table(type(self).__name__, rows) + "".join(config._repr_html_() for config in configs)

    def fit(self, *, raise_on_failure: bool = True) -> Result:
        """Run the train function on every worker until it ends.

        Args:
            raise_on_failure: True to raise :class:`~drivetrain.TrainingFailedError` if the training fails; False to
                return a result with this error as ``Result.error``. Errors that prevent the start of the run are always
                raised.

        Returns:
            The result, which is also stored in the run directory.

        Raises:
            TrainingFailedError: a worker or a callback failed and no retry was left; ``__cause__`` is the root cause.
            ConfigurationError: the configuration is invalid; nothing was started.
            ResourceError: the run requests more resources than exist, or than become free in time.
            PluginError: the runtime or a callback is not installed, or cannot be loaded; nothing was started.
            SerializationError: the train function or its config cannot be pickled; nothing was started.
            BackendError: the backend cannot be pickled, or failed in ``validate()``; nothing was started.
            RunExistsError: a run with that name exists and resuming was not requested; that run was not changed.
            RunInUseError: another driver is working on the run.
            StorageError: the run directory cannot be written.
            CallbackError: a callback raised in ``on_run_end`` after a successful training.
            KeyboardInterrupt: Ctrl-C was pressed; all workers have ended. The first Ctrl-C lets a train function that
                calls :func:`~drivetrain.get_preemption_info` save and return. Otherwise, or if Ctrl-C is pressed again,
                the train function is terminated.
            SystemExit: the driver received SIGTERM or SIGHUP, which have the same effect as Ctrl-C.
        """
        interrupts = Interrupts()
        try:
            with interrupts.from_signals():
                return self._run(interrupts, raise_on_failure)
        except KeyboardInterrupt as error:  # where the driver was waiting is of no interest
            raise error.with_traceback(without_internal_frames(error.__traceback__)) from None
        finally:
            interrupts.close()

    def start(self, *, raise_on_failure: bool = True) -> RunHandle:
        """Run :meth:`fit` in a background thread and return immediately.

        Args:
            raise_on_failure: see :meth:`fit`.

        Returns:
            A handle for waiting for the run or cancelling it.

        Example:
            >>> import drivetrain
            >>> run = DataParallelTrainer(
            ...     lambda: drivetrain.report({"step": 1}),
            ...     scaling_config=ScalingConfig(num_workers=2),
            ...     run_config=RunConfig(verbose=0),
            ... ).start()
            >>> run.result().metrics["step"]
            1
        """
        return RunHandle(lambda interrupts: self._run(interrupts, raise_on_failure))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error: a trainer is no train function and no trainable."""
        raise ConfigurationError(
            f"[DT-750] {type(self).__name__}: expected a call of fit() or as_trainable(), got a trainer used as "
            "a function. Pass trainer.as_trainable() to ray.tune.Tuner, or use drivetrain_tune.Tuner(trainer)"
        )

    if not TYPE_CHECKING:  # type checkers would take it for the name of the class

        @property
        def __name__(self) -> str:
            """Raise the error of a call: Ray Tune reads the name of what it receives before it starts any trial."""
            self()

    def as_trainable(self, system: str | None = None, *, autoscaling: bool = False) -> Callable[[dict[str, Any]], None]:
        """Return a trainable with which ``ray.tune.Tuner`` and ``ray.tune.run`` run copies of this trainer.

        The keys of ``param_space`` are names of this trainer's arguments; each trial merges its values into the
        arguments of this trainer. Each trial reserves the resources of its workers and the ``trainer_resources`` of the
        scaling configuration, and stores its run inside the trial's directory.

        Requires ``pip install "drivetrain[ray-tune]"``; for a search without Ray, see :class:`drivetrain_tune.Tuner`.

        Args:
            system: the name of the installed plugin for the system that runs the trials; None if only one such
                plugin is installed.
            autoscaling: True if the cluster adds nodes on demand, so that a trial may request more resources than exist
                now.

        Raises:
            PluginNotFoundError: Ray Tune is not installed.
            PluginError: ``system`` is None, and several plugins for such systems are installed.
            SerializationError: an argument of the trainer cannot be pickled.

        Example:
            Try three learning rates::

                from ray import tune

                space = {"train_loop_config": {"lr": tune.grid_search([0.1, 0.01, 0.001])}}
                tune.Tuner(trainer.as_trainable(), param_space=space).fit()
        """
        return trainable_of(self, system=system, autoscaling=autoscaling)

    def vary(self, changes: Mapping[str, Any], *, trial: Trial | None = None, **replaced: Any) -> Self:
        """Return a copy of this trainer with changed arguments.

        Args:
            changes: the changed arguments, by name. A mapping is merged into this trainer's value of the argument
                if that value is a mapping or a configuration object.
            trial: the trial to which the run belongs in a hyperparameter search; None outside a search.
            replaced: arguments that replace the arguments of this trainer without merging.

        Raises:
            ConfigurationError: an argument is unknown or invalid.

        Example:
            >>> trainer = DataParallelTrainer(print, train_loop_config={"lr": 0.1, "epochs": 3})
            >>> trainer.vary({"train_loop_config": {"lr": 0.2}}).given["train_loop_config"]
            {'lr': 0.2, 'epochs': 3}
        """
        check_param_space(changes, self.known_arguments)
        varied = self._with_arguments({**merge_arguments(self.given, changes), **replaced})
        varied._trial = trial
        return varied

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        train_loop_per_worker: TrainFunction[Any] | None = None,
        *,
        storage_filesystem: Any | None = None,
        **arguments: Any,
    ) -> Self:
        """Return a trainer that resumes a run, with the arguments that are stored in the run directory.

        ``fit()`` resumes from the latest committed checkpoint, in the same directory and with the same metrics files.

        This method unpickles ``trainer.pkl``, which can execute code: restore only runs that you trust.
        ``RunConfig(resume=path)`` resumes a run without unpickling anything.

        Args:
            path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
            train_loop_per_worker: the train function; None for the stored function.
            storage_filesystem: the pyarrow or fsspec filesystem of ``path``; None to select it by the path.
            arguments: other arguments of the trainer, which replace the stored arguments. The name, the storage path,
                the storage filesystem and the resume mode in a ``run_config`` are ignored. ``datasets``,
                ``dataset_config`` and ``resume_from_checkpoint`` are not stored: pass them again.

        Raises:
            StorageError: the directory contains no run, or no arguments that can be read.
            ConfigurationError: an argument has the wrong type.
            SerializationError: a configuration could not be stored, or a stored argument cannot be loaded in this
                process; pass it again.
        """
        stored = TrainerFile.read(path, storage_filesystem)
        if train_loop_per_worker is not None:
            arguments[name_of_function(cls)] = train_loop_per_worker
        values = {**stored.load(arguments.keys()), **arguments}
        where = os.fspath(path)
        values["run_config"] = replace(
            values.get("run_config") or RunConfig(),
            name=None,
            storage_path=None,
            storage_filesystem=storage_filesystem,
            resume=where
            if storage_filesystem is not None or "://" in where
            else os.path.abspath(os.path.expanduser(where)),
        )
        try:
            return cls(*values.pop(_VARIADIC, ()), **values)
        except TypeError as error:
            if _GIVEN_TWICE not in str(error):
                raise
            raise ConfigurationError(
                f"[DT-620] restore: expected {cls.__qualname__}.__init__() to pass on the run_config that it gets, but "
                f"it passes its own to the base class ({error}). Write arguments.setdefault('run_config', ...) in it"
            ) from error

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any | None = None) -> bool:
        """Return True if the directory contains a run that :meth:`restore` can resume.

        Args:
            path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
            storage_filesystem: the pyarrow or fsspec filesystem of ``path``; None to select it by the path.

        Raises:
            ConfigurationError: the storage of the path cannot be used.
            StorageError: the storage cannot be read.
        """
        return TrainerFile.exists(path, storage_filesystem)

    def _run(self, interrupts: Interrupts, raise_on_failure: bool) -> Result:
        from drivetrain._driver.fitting import run_job  # not above: workers import this module, but run no job

        # The file is not a part of the stored job: it would keep a trainer alive that has no other reference.
        job = replace(self._job, trial=self._trial)
        return run_job(job, self._trainer_file, interrupts, raise_on_failure=raise_on_failure)

    def _trainer_file(self) -> bytes:
        """Return the stored arguments for :meth:`restore`."""
        return TrainerFile.of({**self.given, _VARIADIC: self._variadic()}).to_bytes()


def trainable_of(
    trainer: DataParallelTrainer,
    *,
    system: str | None = None,
    argument: str | None = None,
    autoscaling: bool = False,
) -> Callable[[dict[str, Any]], None]:
    """Return a trainable: an object, created by a plugin, with which another system runs a trainer's trials.

    Args:
        trainer: the trainer.
        system: see :meth:`DataParallelTrainer.as_trainable`.
        argument: the name of the trainer's argument that is set to the config of a trial; None if the config contains
            arguments of the trainer by name.
        autoscaling: see :meth:`DataParallelTrainer.as_trainable`.
    """
    if system is None:
        make = load_single_plugin("trainable", hint='For Ray Tune, run: pip install "drivetrain[ray-tune]"')
    else:
        make = load_plugin("trainable", system)
    made: Callable[[dict[str, Any]], None] = make(trainer, argument=argument, autoscaling=autoscaling)
    return made


def _check_optional(name: str, value: object, kind: type[Any]) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"[DT-103] {name}: expected a {kind.__name__}, got {value!r}")


def _check_checkpoint_rules(rules: CheckpointConfig) -> None:
    if rules.checkpoint_frequency or rules.checkpoint_at_end:
        raise ConfigurationError(
            f"[DT-106] CheckpointConfig(checkpoint_frequency={rules.checkpoint_frequency}, "
            f"checkpoint_at_end={rules.checkpoint_at_end}): expected neither, because the train function owns the "
            "training loop. Call report(..., checkpoint=...) in the train function"
        )
