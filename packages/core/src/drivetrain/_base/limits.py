"""Recognizes errors whose cause is a limit of the operating system, and explains them."""

from __future__ import annotations

import errno
import resource
from types import TracebackType

__all__ = ["explain_limit"]

_NO_THREAD = "can't start new thread"
_STARTERS = ("drivetrain", "multiprocessing", "os", "subprocess")
"""The packages whose functions call ``fork``. Elsewhere, EAGAIN has other causes, such as a socket without data."""


def explain_limit(error: BaseException) -> str:
    """Return which limit an exception has reached and the remedy, as a sentence; empty for other exceptions."""
    if isinstance(error, RuntimeError) and _NO_THREAD in error.args:
        return _explain("no thread could be started")
    if isinstance(error, OSError) and error.errno == errno.EAGAIN and _innermost_package(error) in _STARTERS:
        return _explain("no process could be started")
    return ""


def _explain(problem: str) -> str:
    limits = [f"{name} ({option}, {value})" for name, option, value in _low_limits()]
    return (
        f"{problem}, because the number of processes and threads, or the memory, is limited: check "
        f"{' and '.join(limits) or 'the limits of the container, such as pids.max'}. Raise the limit, or use fewer "
        "workers"
    )


def _low_limits() -> list[tuple[str, str, int]]:
    kinds = [
        ("the limit on processes", "ulimit -u", resource.RLIMIT_NPROC, 1),
        ("the address space in KiB", "ulimit -v", resource.RLIMIT_AS, 1024),
    ]
    values = [(name, option, resource.getrlimit(kind)[0], unit) for name, option, kind, unit in kinds]
    return [(name, option, value // unit) for name, option, value, unit in values if value != resource.RLIM_INFINITY]


def _innermost_package(error: BaseException) -> str:
    frames: TracebackType | None = error.__traceback__
    package = ""
    while frames is not None:
        package = str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        frames = frames.tb_next
    return package
