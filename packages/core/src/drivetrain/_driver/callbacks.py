"""The callbacks of a run: the default callbacks, and the callbacks in ``RunConfig(callbacks=...)``."""

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
    """Return the callbacks in the order in which they are called: the default callbacks, then the configured ones.

    A default callback is omitted if the configuration contains a callback of the same class or of a subclass.

    Raises:
        PluginError: a callback that is given by name is not installed, does not load, or is not a callback.
    """
    given = [
        _load(callback) if isinstance(callback, str) else cast("Callback", callback) for callback in config.callbacks
    ]
    defaults: list[type[Callback]] = [Timeline, JsonLoggerCallback, CSVLoggerCallback]
    if config.verbose:
        defaults.append(ProgressCallback)
    return [kind() for kind in defaults if not any(isinstance(callback, kind) for callback in given)] + given


def _load(name: str) -> Callback:
    kind = load_plugin("callback", name)
    try:
        callback: Callback = kind()
    except DrivetrainError:
        raise
    except Exception as error:  # the class is user code
        raise PluginBrokenError(
            f"[DT-602] callback {name!r}: creating it without arguments raised {type(error).__name__}: {error}. "
            f"Pass an object to RunConfig(callbacks=...) instead: {getattr(kind, '__qualname__', kind)}(...)"
        ) from error
    if not callable(getattr(callback, "on_report", None)):
        raise PluginBrokenError(f"[DT-602] callback {name!r}: expected a drivetrain.Callback, got {callback!r}")
    return callback
