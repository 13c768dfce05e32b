"""What is resolved and checked before a run starts: the runtime, the storage, and what is sent to the workers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from drivetrain._base.pickling import dumps
from drivetrain._hooks.plugins import has_address, installed_plugins, load_plugin, missing_runtimes
from drivetrain._runtimes.base import Runtime
from drivetrain._runtimes.inprocess import InProcessRuntime
from drivetrain._runtimes.local import LocalRuntime
from drivetrain.config import RunConfig, ScalingConfig
from drivetrain.errors import ConfigurationError, PluginBrokenError, PluginNotFoundError, SerializationError

__all__ = [
    "pickle_function",
    "require_shared",
    "resolve_runtime",
]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of what is sent to the workers, for naming the one that cannot be."""

    name: str
    value: Any


def require_shared(config: RunConfig) -> None:
    """Refuses a storage that other processes cannot see."""
    path = config.storage_path if config.resume in ("never", "auto", "must") else config.resume
    protocol = getattr(config.storage_filesystem, "protocol", None)
    if str(path).startswith("memory://") or "memory" in (protocol if isinstance(protocol, tuple) else (protocol,)):
        raise ConfigurationError(
            f"storage_path: expected a storage that the workers share, got {path}, which only this process can see: "
            "use another storage, or ScalingConfig(num_workers=0)"
        )


def resolve_runtime(scaling: ScalingConfig, *, required: str | None = None) -> Runtime:
    """The runtime that was asked for, or the one that fits the datasets and the environment.

    Args:
        scaling: names or is the runtime, or leaves it open.
        required: the name of the runtime that a dataset requires.
    """
    if scaling.runtime is not None and not isinstance(scaling.runtime, str):
        return cast("Runtime", scaling.runtime)
    if scaling.runtime is None and scaling.max_workers == 0:
        return InProcessRuntime()
    name = scaling.runtime or required or _detect_runtime()
    if name is None:
        _refuse_missing_runtime()
        return LocalRuntime()
    try:
        runtime: Runtime = load_plugin("runtime", name)()
    except PluginNotFoundError as error:
        if scaling.runtime is None:
            raise
        raise ConfigurationError(str(error)) from error
    return runtime


def _detect_runtime() -> str | None:
    """The name of the first runtime of a plugin that the environment selects."""
    for plugin in installed_plugins("runtime"):
        if plugin.distribution == "drivetrain":  # these are chosen by the number of workers
            continue
        try:
            if plugin.load().detect():
                return plugin.name
        except PluginBrokenError as error:
            warnings.warn(str(error), stacklevel=2)
        except Exception as error:  # raised by a plugin that this run may not need
            problem = f"detect() raised {type(error).__name__}: {error}"
            warnings.warn(f"runtime {plugin.name!r} of {plugin.distribution}: {problem}", stacklevel=2)
        else:
            continue
        if has_address(plugin.name):  # the run must not start elsewhere; using the broken plugin shows its error
            return plugin.name
    return None


def _refuse_missing_runtime() -> None:
    """Refuses to run on this machine if the environment selects a runtime whose package is missing."""
    missing = missing_runtimes()
    if missing:
        name, variable = next(iter(missing.items()))
        raise PluginNotFoundError(
            f"the environment variable {variable} selects the runtime {name!r}, which is not installed. "
            f'Run: pip install "drivetrain[{name}]", or select another one: ScalingConfig(runtime="local")'
        )


def pickle_function(
    function: Callable[..., Any], config: Mapping[str, Any] | None, reduce: Callable[[Any], Any]
) -> bytes:
    """Pickles what the workers run; on failure names the object that cannot be pickled."""
    try:
        return dumps((function, config if config is not None else {}), reduce)
    except Exception as error:  # whatever a user's object may raise
        culprit = _find_unpicklable(function, config, reduce) or "the train function"
        raise SerializationError(
            f"workers: expected a train function and config that can be pickled; {culprit} cannot be "
            f"({type(error).__name__}: {error}). Create it inside the train function instead"
        ) from error


def _find_unpicklable(
    function: Callable[..., Any], config: Mapping[str, Any] | None, reduce: Callable[[Any], Any]
) -> str | None:
    parts = [_Part(f"train_loop_config[{key!r}]", value) for key, value in (config or {}).items()]
    try:
        captured = inspect.getclosurevars(function)
    except TypeError:
        captured = None
    if captured is not None:
        parts += [_Part(f"{name!r}, which the train function captures", v) for name, v in captured.nonlocals.items()]
        parts += [
            _Part(f"the global {name!r}, which the train function uses", v) for name, v in captured.globals.items()
        ]
    for part in parts:
        try:
            dumps(part.value, reduce)
        except Exception:  # whatever a user's object may raise
            return f"{part.name} (a {type(part.value).__name__})"
    return None
