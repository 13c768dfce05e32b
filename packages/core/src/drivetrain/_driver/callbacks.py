"""The callbacks of a run: the default callbacks, and the callbacks in ``RunConfig(callbacks=...)``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import cast

from drivetrain._base.closest import closest
from drivetrain._hooks.callback import Callback
from drivetrain._plugins.loading import create_plugin, installed_plugins, load_plugin
from drivetrain._plugins.signatures import find_misspelled_method, find_wrong_method
from drivetrain.config import RunConfig
from drivetrain.errors import PluginBrokenError
from drivetrain.loggers.csvfile import CSVLoggerCallback
from drivetrain.loggers.jsonfile import JsonLoggerCallback
from drivetrain.loggers.missing import MissingMetrics
from drivetrain.loggers.timeline import Timeline

__all__ = ["interface_of", "make_callbacks", "unknown_hooks"]

_DISPLAY = "progress"
"""The name of the callback that shows the progress of a run, if it is installed."""


def make_callbacks(config: RunConfig, of_backend: Sequence[Callback] = ()) -> list[Callback]:
    """Return the callbacks in the order in which they are called: the default callbacks, then the configured ones.

    A default callback is omitted if the configuration contains a callback of the same class or of a subclass.

    Args:
        config: contains the configured callbacks.
        of_backend: the default callbacks of the backend.

    Raises:
        PluginError: a callback that is given by name is not installed, does not load, or is not a callback; or a hook
            of a callback has the wrong parameters.
    """
    given = [_make(callback) for callback in config.callbacks]
    for callback in given:
        if (problem := find_wrong_method(callback, interface_of(callback))) is not None:
            raise PluginBrokenError(f"[DT-602] RunConfig(callbacks=...): {problem}")
        for message in unknown_hooks(callback):
            warnings.warn(message, stacklevel=2)
    defaults: list[type[Callback]] = [Timeline, JsonLoggerCallback, CSVLoggerCallback, MissingMetrics]
    if config.verbose and any(plugin.name == _DISPLAY for plugin in installed_plugins("callback")):
        defaults.append(load_plugin("callback", _DISPLAY))
    created = [*(kind() for kind in defaults), *of_backend]
    return [each for each in created if not any(isinstance(callback, type(each)) for callback in given)] + given


def _make(given: object) -> Callback:
    if not isinstance(given, (str, tuple)):
        return cast("Callback", given)
    name, options = (given, {}) if isinstance(given, str) else given
    callback: Callback = create_plugin("callback", name, options)
    if not callable(getattr(callback, "on_report", None)):
        raise PluginBrokenError(f"[DT-602] callback {name!r}: expected a drivetrain.Callback, got {callback!r}")
    return callback


def interface_of(callback: object) -> type:
    """Return the class whose methods a callback implements: its first abstract base class, or ``Callback``."""
    return next((base for base in type(callback).__mro__ if inspect.isabstract(base)), Callback)


def unknown_hooks(callback: object) -> list[str]:
    """Return a message for each method whose name looks like a hook, although drivetrain never calls it.

    For subclasses of an abstract class, such as trackers, this includes the methods of that class.
    """
    hooks = {name for name in dir(Callback) if name.startswith("on_")}
    messages = []
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in hooks and callable(getattr(type(callback), name)):
            meant = closest(name, hooks, similarity=0.85)
            hint = f" Did you mean {meant!r}?" if meant else f" The hooks are: {', '.join(sorted(hooks))}."
            owner = type(callback).__qualname__
            messages.append(f"{owner}.{name}() is never called, because Callback has no such hook.{hint}")
    interface = interface_of(callback)
    misspelled = find_misspelled_method(callback, interface) if interface is not Callback else None
    return messages if misspelled is None else [*messages, misspelled]
