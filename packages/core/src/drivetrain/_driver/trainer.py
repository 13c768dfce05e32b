"""``DataParallelTrainer.fit()``: from a train function and configs to a result."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain._base.interrupts import Interrupts
from drivetrain._base.notebook import as_table
from drivetrain._base.pickling import dumps
from drivetrain._base.redact import redact
from drivetrain._driver.arguments import KeepsArguments, check_param_space, merge_arguments, resolve_backend
from drivetrain._driver.handle import RunHandle
from drivetrain._driver.result import Result
from drivetrain._driver.trainerfile import TrainerFile
from drivetrain._hooks.backend import Backend, BackendConfig
from drivetrain._hooks.context import Trial
from drivetrain._hooks.data_config import DataConfig
from drivetrain._hooks.plugins import load_only_plugin, load_plugin
from drivetrain._storage.checkpoint import Checkpoint, metadata_json
from drivetrain.config import CheckpointConfig, RunConfig, ScalingConfig
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DataParallelTrainer"]


_ATTEMPTS_TOLD = 5


class DataParallelTrainer(KeepsArguments):
    """Runs one function on every worker of a group.

    A trainer for one backend is a subclass with the class of the backend's configuration. After
    ``class JaxTrainer(DataParallelTrainer, config=JaxConfig)``, the trainer takes an argument ``jax_config`` instead of
    ``backend_config``.

    Args:
        train_loop_per_worker: the train function; it takes no argument, or the config.
        train_loop_config: what to pass to it.
        backend_config: what sets the framework up around it: a configuration, a backend, or the name of an
            installed one such as ``"torch"``; None for nothing.
        scaling_config: how many workers, with what.
        run_config: where results are kept, how the run is watched, and when it ends.
        datasets: by name, what each worker gets a part of with :func:`~drivetrain.get_dataset_shard`: a path to
            Parquet, CSV, JSON or Arrow files (or a list of them), a pandas or polars data frame, a pyarrow table or
            dataset, a Hugging Face or Ray dataset, a dict of arrays, or a function that returns one of these.
        dataset_config: which of them are split, and how.
        metadata: what ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` give back; values
            that JSON knows, or bytes.
        resume_from_checkpoint: what ``get_checkpoint()`` returns at the start of a new run.
        **named_config: in a trainer for one backend: the configuration of the backend, under its own name.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the function cannot be called as described.
        PluginError: the backend is not installed, or does not load.

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

    _config_type: ClassVar[type[BackendConfig] | None] = None
    _config_argument: ClassVar[str] = "backend_config"
    _all_values: ClassVar[bool] = False  # Result.return_value is the list of all ranks' values
    _trial: Trial | None = None

    def __init_subclass__(cls, *, config: type[BackendConfig] | None = None, **options: Any) -> None:
        if config is not None:
            if cls._config_type is None:  # a subclass with a more specific configuration keeps the argument's name
                cls._config_argument = f"{config.__name__.removesuffix('Config').lower()}_config"
            cls._config_type = config
        super().__init_subclass__(**options)

    @classmethod
    def _constructor_signature(cls) -> inspect.Signature:
        """The signature of the constructor, with the argument for the configuration of the backend under its name."""
        signature = super()._constructor_signature()
        if "named_config" not in signature.parameters:  # a subclass has a constructor of its own
            return signature
        parameters = [parameter for name, parameter in signature.parameters.items() if name != "named_config"]
        if cls._config_type is not None:
            config = inspect.Parameter(
                cls._config_argument,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=f"{cls._config_type.__name__} | None",
            )
            parameters = [config if parameter.name == "backend_config" else parameter for parameter in parameters]
        return signature.replace(parameters=parameters)

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        backend_config: BackendConfig | Backend | str | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        **named_config: BackendConfig | None,
    ) -> None:
        _check_function(train_loop_per_worker)
        _check_optional("train_loop_config", train_loop_config, Mapping)
        _check_optional("scaling_config", scaling_config, ScalingConfig)
        _check_optional("run_config", run_config, RunConfig)
        _check_optional("datasets", datasets, Mapping)
        _check_optional("dataset_config", dataset_config, DataConfig)
        _check_optional("metadata", metadata, Mapping)
        _check_optional("resume_from_checkpoint", resume_from_checkpoint, Checkpoint)
        try:
            metadata_json(dict(metadata or {}))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"metadata: expected values that JSON knows, or bytes: {error}") from error
        self._function = train_loop_per_worker
        self._config = None if train_loop_config is None else dict(train_loop_config)
        self._given_backend = self._choose_config(backend_config, named_config)
        self._backend = resolve_backend(self._given_backend)
        self._scaling = scaling_config or ScalingConfig()
        self._run_config = run_config or RunConfig()
        self._datasets = dict(datasets or {})
        self._data_config = dataset_config or DataConfig()
        self._metadata = dict(metadata or {})
        self._resume_from = resume_from_checkpoint
        _check_checkpoint_rules(self._run_config.checkpoint_config)

    def _choose_config(
        self, backend_config: BackendConfig | Backend | str | None, named: Mapping[str, BackendConfig | None]
    ) -> BackendConfig | Backend | str:
        """The configuration of the backend, from ``backend_config`` or from the argument that ``config=`` has named."""
        owner, kind, argument = type(self).__name__, self._config_type, self._config_argument
        given: dict[str, Any] = dict(named)
        if backend_config is not None:
            given["backend_config"] = backend_config
        unexpected = sorted(given.keys() - {argument})
        if unexpected:
            raise TypeError(f"{owner}.__init__() got an unexpected keyword argument {unexpected[0]!r}")
        config: BackendConfig | Backend | str | None = given.get(argument)
        if config is None:
            return BackendConfig() if kind is None else kind()
        if kind is not None and not isinstance(config, kind):
            raise ConfigurationError(f"{owner}({argument}=...): expected {kind.__name__}, got {config!r}")
        return config

    def _repr_html_(self) -> str:
        facts = self._facts()
        rows = {
            "train function": facts["train_function"],
            "config": facts["train_loop_config"],
            "backend": type(self._backend).__name__,
            "datasets": ", ".join(self._datasets) or "none",
        }
        configs = (self._scaling, self._run_config, self._run_config.failure_config, self._run_config.checkpoint_config)
        return as_table(type(self).__name__, rows) + "".join(config._repr_html_() for config in configs)

    def fit(self, *, raise_on_failure: bool = True) -> Result:
        """Runs the train function to its end on every worker, and waits for it.

        Args:
            raise_on_failure: False has the :class:`~drivetrain.TrainingFailedError` of a training that failed be
                the result's ``error`` instead; whatever keeps it from being started is raised all the same.

        Returns:
            The result; everything in it is on storage as well.

        Raises:
            TrainingFailedError: a worker or a callback failed and no retry was left; ``__cause__`` is the root cause.
            ConfigurationError: the configs ask for what cannot be; nothing was started.
            ResourceError: more is asked for than exists, or becomes free in time.
            PluginError: the runtime or a callback is not installed, or does not load; nothing was started.
            SerializationError: the train function or its config cannot be pickled; nothing was started.
            RunExistsError: a run of that name exists, and resuming was not asked for; it was left as it is.
            RunInUseError: another driver is working on the run.
            StorageError: the run directory cannot be written.
            CallbackError: a callback raised in ``on_run_end``, after a training that succeeded.
            KeyboardInterrupt: Ctrl-C; every worker has ended. The first one lets a train function that asks
                :func:`~drivetrain.get_preemption_info` save and return, the second does not.
            SystemExit: SIGTERM, likewise.
        """
        interrupts = Interrupts()
        try:
            with interrupts.from_signals():
                return self._run(interrupts, raise_on_failure)
        finally:
            interrupts.close()

    def start(self, *, raise_on_failure: bool = True) -> RunHandle:
        """Like :meth:`fit` in a thread of its own, so that this one can go on: to do something else, or to cancel it.

        Args:
            raise_on_failure: see :meth:`fit`.

        Returns:
            What the run can be waited for with, and cancelled.

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

    def as_trainable(self, system: str | None = None, *, autoscaling: bool = False) -> Callable[[dict[str, Any]], None]:
        """What ``ray.tune.Tuner`` and ``ray.tune.run`` take to try this trainer with other arguments.

        A trial's ``param_space`` has the names of this trainer's arguments, and is merged with what it was made with.
        Each trial reserves the resources of its workers and of ``trainer_resources`` together, and its run has a
        directory in the trial's. Needs ``pip install "drivetrain[ray-tune]"``; for a search without Ray see
        :class:`drivetrain_tune.Tuner`.

        Args:
            system: the name of an installed plugin for another system that runs trainers; None takes the only one.
            autoscaling: the cluster adds nodes on demand, so a trial may request more than exists now.

        Raises:
            PluginNotFoundError: Ray Tune is not installed.
            PluginError: several such plugins are installed, and ``system`` is None.
            SerializationError: an argument of the trainer cannot be sent to a trial.

        Example:
            One of three learning rates::

                from ray import tune

                space = {"train_loop_config": {"lr": tune.grid_search([0.1, 0.01, 0.001])}}
                tune.Tuner(trainer.as_trainable(), param_space=space).fit()
        """
        return trainable_of(self, system=system, autoscaling=autoscaling)

    def vary(self, changes: Mapping[str, Any], *, trial: Trial | None = None, **replaced: Any) -> Self:
        """Another trainer, made as this one was but for some arguments.

        Args:
            changes: arguments by name. Mappings are merged with what this one was made with, also where that is a
                configuration.
            trial: the place of its run in a search for hyperparameters.
            replaced: arguments that are not merged, but take the place of those of this one.

        Raises:
            ConfigurationError: an argument is unknown, or not as the trainer wants it.

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
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any] | None = None,
        *,
        storage_filesystem: Any | None = None,
        **arguments: Any,
    ) -> Self:
        """A trainer that continues a run: what it was made with comes from the run's directory.

        ``fit()`` goes on from the run's latest committed checkpoint, in its directory, with its metrics files.

        This unpickles ``trainer.pkl``, which can execute code: restore only runs that you trust.
        ``RunConfig(resume=path)`` continues a run without unpickling anything.

        Args:
            path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
            train_loop_per_worker: the train function, if it is not to be the stored one.
            storage_filesystem: the filesystem of pyarrow or fsspec that ``path`` is on; None for the one it names.
            arguments: the trainer's other arguments, each in place of the stored one. The name, the storage path and
                the resume mode of a ``run_config`` are those of the run. ``datasets`` are not stored: give them again.

        Raises:
            StorageError: there is no run, or not what it was made with.
            ConfigurationError: an argument is of the wrong type.
            SerializationError: something stored cannot be loaded here; give it anew.
        """
        stored = TrainerFile.read(path, storage_filesystem)
        if train_loop_per_worker is not None:
            arguments["train_loop_per_worker"] = train_loop_per_worker
        known = ("train_loop_config", "scaling_config", "run_config", "metadata", cls._config_argument)
        values = stored.load({"train_loop_per_worker", *known} - arguments.keys())
        values.update(arguments)
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
        return cls(**values)

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any | None = None) -> bool:
        """Whether there is a run in that directory that :meth:`restore` can continue.

        Args:
            path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
            storage_filesystem: the filesystem of pyarrow or fsspec that ``path`` is on; None for the one it names.

        Raises:
            ConfigurationError: the path is on a storage that cannot be used.
            StorageError: the storage cannot be read.
        """
        return TrainerFile.exists(path, storage_filesystem)

    def _run(self, interrupts: Interrupts, raise_on_failure: bool) -> Result:
        # The engine is imported here, as workers also import modules that define trainers, and never run them.
        from drivetrain._driver.fitting import TrainerRecord, TrainingJob, run_job

        job = TrainingJob(
            function=self._function,
            config=self._config,
            backend=self._backend,
            scaling=self._scaling,
            run_config=self._run_config,
            datasets=self._datasets,
            data_config=self._data_config,
            metadata=self._metadata,
            resume_from=self._resume_from,
            trial=self._trial,
            all_values=self._all_values,
            record=TrainerRecord(self._facts(), self._trainer_file),
        )
        return run_job(job, interrupts, raise_on_failure=raise_on_failure)

    def _facts(self) -> dict[str, Any]:
        """What ``run.json`` says about the configuration."""
        return {
            "trainer": type(self).__name__,
            "train_function": getattr(self._function, "__qualname__", type(self._function).__qualname__),
            "scaling_config": redact(repr(self._scaling)),
            "run_config": redact(repr(self._run_config)),
            "train_loop_config": redact(repr(self._config)),
        }

    def _trainer_file(self) -> bytes:
        """What :meth:`restore` makes a trainer from; a filesystem object may hold credentials, and is left out."""
        stored = TrainerFile.of(
            pickled={"train_loop_per_worker": dumps(self._function), "train_loop_config": dumps(self._config)},
            values={
                "scaling_config": self._scaling,
                "run_config": replace(self._run_config, storage_filesystem=None),
                "metadata": self._metadata,
                self._config_argument: self._given_backend,
            },
        )
        return stored.to_bytes()


def trainable_of(
    trainer: DataParallelTrainer,
    *,
    system: str | None = None,
    argument: str | None = None,
    autoscaling: bool = False,
) -> Callable[[dict[str, Any]], None]:
    """What another system takes to run a trainer with other arguments; a plugin makes it.

    Args:
        trainer: the trainer.
        system: see :meth:`DataParallelTrainer.as_trainable`.
        argument: the one of its arguments that a trial's config is; None where the config has arguments by name.
        autoscaling: see :meth:`DataParallelTrainer.as_trainable`.
    """
    if system is None:
        make = load_only_plugin("trainable", hint='For Ray Tune, run: pip install "drivetrain[ray-tune]"')
    else:
        make = load_plugin("trainable", system)
    made: Callable[[dict[str, Any]], None] = make(trainer, argument=argument, autoscaling=autoscaling)
    return made


def _check_optional(name: str, value: object, kind: type[Any]) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"{name}: expected a {kind.__name__}, got {value!r}")


def _check_checkpoint_rules(rules: CheckpointConfig) -> None:
    if rules.checkpoint_frequency or rules.checkpoint_at_end:
        raise ConfigurationError(
            f"CheckpointConfig(checkpoint_frequency={rules.checkpoint_frequency}, "
            f"checkpoint_at_end={rules.checkpoint_at_end}) is for trainers that own the training loop, and here the "
            "train function does: call report(..., checkpoint=...) in it"
        )


def _check_function(function: object) -> None:
    if not callable(function):
        raise ConfigurationError(f"train_loop_per_worker: expected a function, got {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    only_by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 1 or only_by_keyword:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigurationError(
            "train_loop_per_worker: expected no argument, or the config as the only required one, got "
            f"{name}{signature}: put the other values into train_loop_config"
        )
