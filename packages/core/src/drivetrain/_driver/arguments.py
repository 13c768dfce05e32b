"""The arguments of a trainer: how they are kept, how a trial changes them, and what a backend's argument means."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from drivetrain._hooks.backend import Backend, BackendConfig, NoBackend
from drivetrain._hooks.data_config import DataConfig
from drivetrain._hooks.plugins import load_plugin
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain.config import RunConfig, ScalingConfig
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["KeepsArguments", "TrainerArguments", "check_param_space", "merge_arguments", "resolve_backend"]

_OF_THE_RUN = ("run_config", "tune_config")


class TrainerArguments(TypedDict, total=False):
    """The arguments that every trainer takes, except for the train function and the configuration of its backend.

    A subclass can declare its constructor for type checkers and editors with
    ``**arguments: Unpack[TrainerArguments]``. See :class:`drivetrain.DataParallelTrainer` for each of them.
    """

    train_loop_config: Mapping[str, Any] | None
    scaling_config: ScalingConfig | None
    run_config: RunConfig | None
    datasets: Mapping[str, Any] | None
    dataset_config: DataConfig | None
    metadata: Mapping[str, Any] | None
    resume_from_checkpoint: Checkpoint | None


class KeepsArguments:
    """Keeps the arguments of its constructor, so that an object like it can be made with some of them changed.

    Python passes the arguments of a constructor to ``__new__`` first. So they are kept as the user wrote them, also in
    subclasses with constructors of their own, whose arguments differ from those of the base.
    """

    __signature__: ClassVar[inspect.Signature]
    _call: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._call = args, kwargs
        return made

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = cls._constructor_signature()  # otherwise, some tools show the one of __new__

    @classmethod
    def _constructor_signature(cls) -> inspect.Signature:
        """The signature of the constructor, as users call it."""
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that it was made with, by name."""
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
        """The names of the arguments that it takes; None for any."""
        parameters = self.__signature__.parameters.values()
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return frozenset(parameter.name for parameter in parameters)

    def _with_arguments(self, arguments: Mapping[str, Any]) -> Self:
        """Another object of this class, with the same ``*args`` and other arguments by name."""
        bound = self._bound_call()
        variadic = [
            value
            for name, values in bound.arguments.items()
            if bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for value in values
        ]
        return type(self)(*variadic, **arguments)

    def _bound_call(self) -> inspect.BoundArguments:
        args, kwargs = self._call
        try:
            return self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"the arguments of this {type(self).__name__} are unknown ({error}). If one of its base classes has a "
                "__new__, pass all arguments on: super().__new__(cls, *args, **kwargs)"
            ) from error


def check_param_space(param_space: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Refuses what no trial can change.

    Args:
        param_space: by the names of a trainer's arguments.
        known: those names; None for any.

    Raises:
        ConfigurationError: it has settings of the run, or what the trainer does not take.
    """
    if not isinstance(param_space, Mapping):
        raise ConfigurationError(f"param_space: expected a mapping, got {param_space!r}")
    for name in _OF_THE_RUN:
        if name in param_space:
            raise ConfigurationError(
                f"param_space: expected arguments of the trainer that differ from trial to trial, got {name!r}, "
                "which is "
                f"the same for all of them: pass it to the Tuner, as Tuner(..., {name}=...)"
            )
    if known is not None and (unknown := [name for name in param_space if name not in known]):
        tunable = ", ".join(sorted(set(known) - set(_OF_THE_RUN)))
        raise ConfigurationError(
            f"param_space: expected names of the trainer's arguments ({tunable}), got {unknown[0]!r}: what the train "
            f'function is to get goes into param_space={{"train_loop_config": {{{unknown[0]!r}: ...}}}}'
        )


def merge_arguments(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's arguments with changes in them.

    Mappings are merged key by key, at every depth, and a configuration takes over what a mapping says of its fields;
    another configuration takes its place. Of ``datasets`` each is replaced as a whole, and so is everything else.

    Args:
        given: what the trainer was made with.
        changes: by the same names.

    Raises:
        ConfigurationError: a configuration does not have a field.
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
                    f"param_space[{where!r}]: expected fields of {type(before).__name__} ({', '.join(names)}), "
                    f"got {unknown[0]!r}"
                )
            return replace(before, **{name: _merge(getattr(before, name), each, name) for name, each in value.items()})
        return value
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return {**before, **{key: _merge(before.get(key), each, str(key)) for key, each in value.items()}}
    return value


def _is_config(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def resolve_backend(given: BackendConfig | Backend | str) -> Backend:
    """Returns the backend for a name, a configuration, or a backend."""
    if isinstance(given, str):
        given = load_plugin("backend", given)() if given != "none" else NoBackend()
    backend = given if isinstance(given, Backend) else given.create() if isinstance(given, BackendConfig) else None
    if backend is None:
        raise ConfigurationError(
            f"backend_config: expected a BackendConfig, a Backend or the name of one, got {given!r}"
        )
    return backend
