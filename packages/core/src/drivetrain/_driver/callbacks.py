"""The callbacks of a run: those that every run has, and those that ``RunConfig(callbacks=...)`` names."""

from __future__ import annotations

from typing import cast

from drivetrain._hooks.callback import Callback
from drivetrain._hooks.plugins import load_plugin
from drivetrain.config import RunConfig
from drivetrain.errors import DrivetrainError, PluginBrokenError
from drivetrain.loggers.csvfile import CSVLoggerCallback
from drivetrain.loggers.jsonfile import JsonLoggerCallback
from drivetrain.loggers.progress import ProgressCallback
from drivetrain.loggers.timeline import Timeline

__all__ = ["make_callbacks"]


def make_callbacks(config: RunConfig) -> list[Callback]:
    """The callbacks, in the order in which they are called.

    One that every run has is left out where the configuration has one of its class, which then takes its place.

    Raises:
        PluginError: a name is not installed, does not load, or is no callback's.
    """
    given = [
        _load(callback) if isinstance(callback, str) else cast("Callback", callback) for callback in config.callbacks
    ]
    usual: list[type[Callback]] = [Timeline, JsonLoggerCallback, CSVLoggerCallback]
    if config.verbose:
        usual.append(ProgressCallback)
    return [kind() for kind in usual if not any(isinstance(callback, kind) for callback in given)] + given


def _load(name: str) -> Callback:
    kind = load_plugin("callback", name)
    try:
        callback: Callback = kind()
    except DrivetrainError:
        raise
    except Exception as error:  # whatever somebody's class may raise
        raise PluginBrokenError(
            f"the callback {name!r} cannot be made without arguments ({type(error).__name__}: {error}): "
            f"give RunConfig(callbacks=...) an object, {getattr(kind, '__qualname__', kind)}(...), instead of its name"
        ) from error
    if not callable(getattr(callback, "on_report", None)):
        raise PluginBrokenError(f"the callback {name!r}: expected a drivetrain.Callback, got {callback!r}")
    return callback
