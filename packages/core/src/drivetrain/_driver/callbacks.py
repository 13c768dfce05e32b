"""The callbacks of a run: the default callbacks, and the callbacks in ``RunConfig(callbacks=...)``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

from drivetrain._hooks.callback import Callback
from drivetrain._hooks.plugins import create_plugin
from drivetrain._hooks.signatures import find_misspelled_method, find_wrong_method
from drivetrain.config import RunConfig
from drivetrain.errors import PluginBrokenError
from drivetrain.loggers.csvfile import CSVLoggerCallback
from drivetrain.loggers.jsonfile import JsonLoggerCallback
from drivetrain.loggers.missing import MissingMetrics
from drivetrain.loggers.progress import ProgressCallback
from drivetrain.loggers.timeline import Timeline
from drivetrain.loggers.tracker import TrackerCallback

__all__ = ["make_callbacks", "unknown_hooks"]


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
        is_tracker = isinstance(callback, TrackerCallback)
        if (problem := find_wrong_method(callback, TrackerCallback if is_tracker else Callback)) is not None:
            raise PluginBrokenError(f"[DT-602] RunConfig(callbacks=...): {problem}")
        for message in unknown_hooks(callback):
            warnings.warn(message, stacklevel=2)
    defaults: list[type[Callback]] = [Timeline, JsonLoggerCallback, CSVLoggerCallback, MissingMetrics]
    if config.verbose:
        defaults.append(ProgressCallback)
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


def unknown_hooks(callback: object) -> list[str]:
    """Return a message for each method whose name looks like a hook, although drivetrain never calls it.

    For trackers, this includes the methods of trackers, such as ``log_failure``.
    """
    hooks = {name for name in dir(Callback) if name.startswith("on_")}
    messages = []
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in hooks and callable(getattr(type(callback), name)):
            import difflib  # rarely needed, and slow to import

            closest = difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
            hint = f" Did you mean {closest[0]!r}?" if closest else f" The hooks are: {', '.join(sorted(hooks))}."
            owner = type(callback).__qualname__
            messages.append(f"{owner}.{name}() is never called, because Callback has no such hook.{hint}")
    misspelled = find_misspelled_method(callback, TrackerCallback) if isinstance(callback, TrackerCallback) else None
    return messages if misspelled is None else [*messages, misspelled]
