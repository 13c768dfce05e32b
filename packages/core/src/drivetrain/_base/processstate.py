"""The settings of the driver's process that every worker receives.

A worker does not execute the script, so settings that the script makes at its top would be missing there. These are the
settings of Python itself; the page of concepts lists them, and the alternatives for all others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from drivetrain._base.interpreter import INSTALLED

__all__ = ["ProcessState"]

_Filter = tuple[str, str, str, str, int]

_added_handlers: list[tuple[logging.Logger, logging.Handler]] = []


@dataclass(frozen=True, slots=True)
class _LoggerState:
    """The settings of a logger. Its handlers are pickles of pairs: a stream, and its handler's level and formatter."""

    level: int
    propagate: bool
    disabled: bool
    handlers: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """The settings of a process.

    Attributes:
        argv: the arguments of the script.
        umask: the permissions that new files do not get.
        recursion_limit: the maximum depth of the interpreter's stack.
        decimal_context: the context of decimal numbers; None if the process does not use them.
        locale: the locale; None if the process has not used the module.
        filters: the filters of warnings. A category is given as ``module:name``.
        loggers: the settings of loggers by name. The name of the root logger is empty.
        disabled_level: the level up to which logging is disabled.
    """

    argv: tuple[str, ...]
    umask: int
    recursion_limit: int
    decimal_context: Any
    locale: str | None
    filters: tuple[_Filter, ...]
    loggers: dict[str, _LoggerState]
    disabled_level: int

    @classmethod
    def of_this_process(cls, dumps: Callable[[Any], bytes]) -> ProcessState:
        """Return the settings of this process.

        Args:
            dumps: pickles the formatter of a log handler.
        """
        locale = sys.modules.get("locale")
        decimal = sys.modules.get("decimal")
        return cls(
            argv=tuple(sys.argv),
            umask=_umask(),
            recursion_limit=sys.getrecursionlimit(),
            decimal_context=None if decimal is None else decimal.getcontext().copy(),
            locale=None if locale is None else locale.setlocale(locale.LC_ALL),
            filters=tuple(_filters()),
            loggers=dict(_loggers(dumps)),
            disabled_level=logging.root.manager.disable,
        )

    def apply(self) -> None:
        """Make the settings that unpickling the train function may depend on."""
        sys.argv[:] = self.argv
        os.umask(self.umask)
        if sys.getrecursionlimit() != self.recursion_limit:
            sys.setrecursionlimit(self.recursion_limit)
        if self.decimal_context is not None:
            import decimal

            decimal.setcontext(self.decimal_context)
        if self.locale is not None:
            import locale

            with contextlib.suppress(locale.Error):  # it is not installed on this node
                if locale.setlocale(locale.LC_ALL) != self.locale:
                    locale.setlocale(locale.LC_ALL, self.locale)
        self._apply_filters()

    def apply_after_imports(self, loads: Callable[[bytes], Any]) -> None:
        """Make the settings that concern imported modules or that an import may change.

        Args:
            loads: unpickles the formatter of a log handler.
        """
        self._apply_filters()
        logging.disable(self.disabled_level)
        while _added_handlers:  # of the run before in the same process
            logger, handler = _added_handlers.pop()
            logger.removeHandler(handler)
        for name, state in self.loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(state.level)
            logger.propagate, logger.disabled = state.propagate, state.disabled
            if not logger.handlers:
                for data in state.handlers:
                    with contextlib.suppress(Exception):  # a formatter of a package that is not installed on this node
                        _add_handler(logger, *loads(data))

    def _apply_filters(self) -> None:
        for action, message, category, module, line in reversed(self.filters):
            package, _, name = category.partition(":")
            if package in sys.modules:  # otherwise nothing can raise such a warning yet
                with contextlib.suppress(AttributeError):
                    kind = pkgutil.resolve_name(f"{package}:{name}")
                    warnings.filterwarnings(cast("Any", action), message, kind, module, line)


def _umask() -> int:
    """Return the umask without changing it, which would affect files that other threads create."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    os.umask(mask := os.umask(0o077))
    return mask


def _filters() -> Iterator[_Filter]:
    """Yield the filters, except those that make an error of every warning.

    Test runners set such a filter for the code that they call. In a worker, any warning of a library would end the run.
    """
    for action, message, category, module, line in warnings.filters:
        if (action, category, message, module) == ("error", Warning, None, None):
            continue
        texts = [str(getattr(pattern, "pattern", pattern) or "") for pattern in (message, module)]
        for kind in category if isinstance(category, tuple) else (category,):
            yield action, texts[0], f"{kind.__module__}:{kind.__qualname__}", texts[1], line


def _loggers(dumps: Callable[[Any], bytes]) -> Iterator[tuple[str, _LoggerState]]:
    known = [logger for logger in list(logging.root.manager.loggerDict.values()) if isinstance(logger, logging.Logger)]
    for logger in (logging.root, *known):
        handlers: list[bytes] = []
        for handler in logger.handlers:
            stream = _name_of_stream(handler)
            if stream is not None and not _configures_itself(logger):
                with contextlib.suppress(Exception):  # a user's formatter may raise any exception
                    handlers.append(dumps((stream, handler.level, handler.formatter)))
        state = _LoggerState(logger.level, logger.propagate, logger.disabled, tuple(handlers))
        if state != _LoggerState(logging.NOTSET, propagate=True, disabled=False, handlers=()):
            yield "" if logger is logging.root else logger.name, state


def _name_of_stream(handler: logging.Handler) -> str | None:
    if type(handler) is logging.StreamHandler:
        for name in ("stdout", "stderr"):
            if handler.stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
                return name
    return None


def _configures_itself(logger: logging.Logger) -> bool:
    """Return True for a logger of an installed package, which adds its handlers when a worker imports it."""
    module = sys.modules.get(logger.name.partition(".")[0])
    file = getattr(module, "__file__", None) or ""
    return any(name in file for name in INSTALLED)


def _add_handler(logger: logging.Logger, stream: str, level: int, formatter: logging.Formatter | None) -> None:
    handler = logging.StreamHandler(getattr(sys, stream))
    handler.setLevel(level)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    _added_handlers.append((logger, handler))
