"""The arguments of a trainer: how they are stored, how a trial changes them, and how the backend is created."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict, TypeVar

from drivetrain._hooks.backend import Backend, BackendConfig, NoBackend
from drivetrain._plugins.data_config import DataConfig
from drivetrain._plugins.loading import load_plugin
from drivetrain._plugins.signatures import find_misspelled_method, find_wrong_method
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain.config import RunConfig, ScalingConfig
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CommonArguments",
    "ConfigT",
    "KeepsArguments",
    "TrainFunction",
    "TrainerArguments",
    "check_param_space",
    "checked_config",
    "merge_arguments",
    "name_of_function",
    "resolve_backend",
]

BackendConfigT = TypeVar("BackendConfigT", bound=BackendConfig)

_RUN_ARGUMENTS = ("run_config", "tune_config")


class _Dataclass(Protocol):
    """An object of a dataclass, for type checkers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


ConfigT = TypeVar("ConfigT", bound="Mapping[str, Any] | _Dataclass")
"""The type of a train function's config: a dict, a ``TypedDict`` or a dataclass.

A trainer uses it for both of its arguments, so that type checkers report a config that the function does not take.
"""

TrainFunction = Callable[[ConfigT], object] | Callable[[], object]
"""The type of a train function, which takes either a config or no argument: ``TrainFunction[ConfigT]``."""


class CommonArguments(TypedDict, total=False):
    """The arguments that every trainer takes, except for the train function, its config, and the backend's config.

    A subclass can declare its constructor for type checkers and editors with ``train_loop_config: ConfigT | None``
    and ``**arguments: Unpack[CommonArguments]``. See :class:`drivetrain.DataParallelTrainer` for the meaning of the
    arguments.
    """

    scaling_config: ScalingConfig | None
    run_config: RunConfig | None
    datasets: Mapping[str, Any] | None
    dataset_config: DataConfig | None
    metadata: Mapping[str, Any] | None
    resume_from_checkpoint: Checkpoint | None


class TrainerArguments(CommonArguments, total=False):
    """The arguments of :class:`CommonArguments`, and the config.

    It is enough for ``**arguments: Unpack[TrainerArguments]``, but type checkers then do not compare the config with
    the argument of the train function.
    """

    train_loop_config: Mapping[str, Any] | _Dataclass | None


class KeepsArguments:
    """Stores the arguments of its constructor, so that a copy with some changed arguments can be created.

    Python passes the arguments of a constructor call to ``__new__`` before it passes them to ``__init__``. ``__new__``
    stores them exactly as the user passed them, so a subclass can have a constructor with other arguments.
    """

    _call: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        instance = super().__new__(cls)
        instance._call = args, kwargs
        return instance

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that were passed to the constructor, by name, without the values of ``*args``."""
        given: dict[str, Any] = {}
        bound = self._bound_call()
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            elif kind is not inspect.Parameter.VAR_POSITIONAL:
                given[name] = value
        return given

    @property
    def known_arguments(self) -> frozenset[str] | None:
        """The names of the arguments that the constructor accepts; None if it accepts any name."""
        names: set[str] = set()
        for parameter in _parameters(type(self)):
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                names.add(parameter.name)
            elif (unpacked := _unpacked_by(str(parameter.annotation))) is not None:
                names |= unpacked.__annotations__.keys()
            else:
                return None
        return frozenset(names)

    def _keep(self, **resolved: Any) -> None:
        """Replace arguments that were passed to the constructor, for ``restore`` and for copies.

        A constructor calls this method if an argument would mean something else later, such as the path of a file.
        """
        bound = self._bound_call()
        bound.arguments.update(resolved)
        self._call = bound.args, bound.kwargs

    def _variadic(self) -> list[Any]:
        """Return the values of ``*args``."""
        bound = self._bound_call()
        kinds = {name: bound.signature.parameters[name].kind for name in bound.arguments}
        listed = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
        return [value for name in listed for value in bound.arguments[name]]

    def _with_arguments(self, arguments: Mapping[str, Any]) -> Self:
        """Return a new object of this class with the same ``*args`` and the given keyword arguments."""
        return type(self)(*self._variadic(), **arguments)

    def _bound_call(self) -> inspect.BoundArguments:
        args, kwargs = self._call
        try:
            return inspect.Signature(_parameters(type(self))).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"{type(self).__name__}: its constructor arguments were not stored ({error}). If a base class defines "
                "__new__, pass on all arguments: super().__new__(cls, *args, **kwargs)"
            ) from error


def _parameters(kind: type) -> list[inspect.Parameter]:
    """Return the parameters of the constructor of a class, without ``self``."""
    return list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc] # of no instance


def _unpacked_by(annotation: str) -> type | None:
    """Return the class with the names of arguments that an annotation of ``**arguments`` stands for, if it has one."""
    kinds = (CommonArguments, TrainerArguments)
    return next((kind for kind in kinds if annotation.endswith(f"Unpack[{kind.__name__}]")), None)


def name_of_function(kind: type) -> str:
    """Return the name of the first parameter of a trainer's constructor, to which users pass the train function."""
    return _parameters(kind)[0].name


def checked_config(given: BackendConfigT | None, kind: type[BackendConfigT], where: str) -> BackendConfigT:
    """Return the configuration of a backend that was passed to a trainer, or the default configuration.

    Args:
        given: the configuration; None for the default one.
        kind: the class of the configuration.
        where: the trainer and the argument, for the error message, such as ``"TorchTrainer(torch_config=...)"``.

    Raises:
        ConfigurationError: the configuration is an object of another class.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise ConfigurationError(f"[DT-103] {where}: expected {kind.__name__}, got {given!r}")
    return given


def check_param_space(param_space: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raise an error if a trial cannot change one of the given arguments of a trainer.

    Args:
        param_space: the values for a trial, by the name of the trainer's argument.
        known: the names of the trainer's arguments; None if the trainer accepts any name.

    Raises:
        ConfigurationError: ``param_space`` is not a mapping, or contains ``run_config``, ``tune_config`` or an unknown
            name.
    """
    if not isinstance(param_space, Mapping):
        raise ConfigurationError(f"[DT-108] param_space: expected a mapping, got {param_space!r}")
    for name in _RUN_ARGUMENTS:
        if name in param_space:
            raise ConfigurationError(
                "[DT-108] param_space: expected arguments of the trainer that can differ between trials, got "
                f"{name!r}, which is the same for all trials. Pass it to the Tuner: Tuner(..., {name}=...)"
            )
    if known is not None and (unknown := [name for name in param_space if name not in known]):
        tunable = ", ".join(sorted(set(known) - set(_RUN_ARGUMENTS)))
        raise ConfigurationError(
            f"[DT-108] param_space: expected names of the trainer's arguments ({tunable}), got {unknown[0]!r}. To "
            f'pass it to the train function, use param_space={{"train_loop_config": {{{unknown[0]!r}: ...}}}}'
        )


def merge_arguments(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer with changes merged into them.

    If both the argument and the change are mappings, they are merged key by key, at every depth. If the argument is a
    configuration object, a mapping changes the fields that it names, and another configuration object replaces the
    argument. Each dataset in ``datasets`` is replaced as a whole, and so is any other value.

    Args:
        given: the arguments of the trainer.
        changes: the new values, by the name of the argument.

    Raises:
        ConfigurationError: a change names a field that the configuration object does not have.
    """
    merged = dict(given)
    for name, value in changes.items():
        before = merged.get(name)
        if name == "datasets" and isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[name] = {**before, **value}
        elif name == "scaling_config":
            merged[name] = _merge(before or ScalingConfig(), value, name)
        else:
            merged[name] = _merge(before, value, name)
    return merged


def _merge(before: Any, value: Any, where: str) -> Any:
    if _is_config(before):
        if isinstance(value, Mapping):
            names = [field.name for field in fields(before) if field.init]
            if unknown := [name for name in value if name not in names]:
                raise ConfigurationError(
                    f"[DT-108] param_space[{where!r}]: expected fields of {type(before).__name__} "
                    f"({', '.join(names)}), got {unknown[0]!r}"
                )
            return replace(before, **{name: _merge(getattr(before, name), each, name) for name, each in value.items()})
        return value
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return {**before, **{key: _merge(before.get(key), each, str(key)) for key, each in value.items()}}
    return value


def _is_config(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def resolve_backend(given: BackendConfig | Backend | str) -> Backend:
    """Return the backend that has the given name or configuration. A given backend is returned unchanged."""
    if isinstance(given, str):
        given = load_plugin("backend", given)() if given != "none" else NoBackend()
    backend: object = given.create() if isinstance(given, BackendConfig) else given
    if not isinstance(backend, Backend) and isinstance(given, BackendConfig):
        raise ConfigurationError(
            f"[DT-607] {type(given).__qualname__}.create(): expected a drivetrain.plugin.Backend, got {backend!r}"
        )
    if not isinstance(backend, Backend):
        raise ConfigurationError(
            "[DT-103] backend_config: expected a BackendConfig, a Backend or the name of an installed backend, "
            f"got {given!r}"
        )
    if (problem := find_wrong_method(backend, Backend)) is not None:
        raise ConfigurationError(f"[DT-607] backend {backend.name!r}: {problem}")
    if (misspelled := find_misspelled_method(backend, Backend)) is not None:
        warnings.warn(f"backend {backend.name!r}: {misspelled}", stacklevel=2)
    return backend
