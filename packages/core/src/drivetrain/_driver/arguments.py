"""What a trial changes in a trainer: its arguments, merged with those that the trainer was made with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from drivetrain.config import ScalingConfig
from drivetrain.errors import ConfigurationError

__all__ = ["check_param_space", "merge_arguments"]

_OF_THE_RUN = ("run_config", "tune_config")


def check_param_space(param_space: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Refuses what no trial can change.

    Args:
        param_space: by the names of a trainer's arguments.
        known: those names; None for any.

    Raises:
        ConfigurationError: it has settings of the run, or what the trainer does not take.
    """
    if not isinstance(param_space, Mapping):
        raise ConfigurationError(f"param_space wants a mapping, found {param_space!r}")
    for name in _OF_THE_RUN:
        if name in param_space:
            raise ConfigurationError(
                f"param_space wants arguments of the trainer that differ from trial to trial, found {name!r}, which is "
                f"the same for all of them: pass it to the Tuner, as Tuner(..., {name}=...)"
            )
    if known is not None and (unknown := [name for name in param_space if name not in known]):
        tunable = ", ".join(sorted(set(known) - set(_OF_THE_RUN)))
        raise ConfigurationError(
            f"param_space wants names of the trainer's arguments ({tunable}), found {unknown[0]!r}: what the train "
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
                    f"param_space[{where!r}] wants fields of {type(before).__name__} ({', '.join(names)}), "
                    f"found {unknown[0]!r}"
                )
            return replace(before, **{name: _merge(getattr(before, name), each, name) for name, each in value.items()})
        return value
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return {**before, **{key: _merge(before.get(key), each, str(key)) for key, each in value.items()}}
    return value


def _is_config(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
