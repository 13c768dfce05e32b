"""A failure on its way from a worker to whoever reads it: captured, pickled, shown.

A worker's exception travels with its own traceback, so that the driver shows the user's frames as if they were its own.
"""

from __future__ import annotations

import errno
import pickle
import time
import traceback
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

import cloudpickle
from tblib import Traceback

from drivetrain.errors import CheckpointError, FailureKind, RemoteError, StorageError

__all__ = ["Failure", "capture_failure", "describe_exit", "rebuild_exception"]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_OUT_OF_MEMORY = ("OutOfMemoryError", "ResourceExhaustedError")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What went wrong, where and when.

    Attributes:
        kind: its class, which decides whether a retry can help.
        summary: one line.
        rank: the world rank it happened on; None where it was no single rank's.
        phase: what that rank was doing.
        time: Unix time in seconds when it happened, by the clock of where it happened.
        exception: the exception, with its traceback.
        log_tail: the last lines of that rank's output, where the process itself could not tell.
        node_id: the node on which a process was lost.
        survived: the other ranks have stayed, and only lost ones were replaced.
    """

    kind: FailureKind
    summary: str
    rank: int | None = None
    phase: str = ""
    time: float = field(default_factory=time.time)
    exception: BaseException | None = None
    log_tail: str = ""
    node_id: str = ""
    survived: bool = False

    def record(self) -> dict[str, object]:
        """What ``error.json`` says about it."""
        return {
            "kind": self.kind.value,
            "rank": self.rank,
            "phase": self.phase,
            "time": self.time,
            "summary": self.summary,
            "exception": type(self.exception).__name__ if self.exception else None,
            "survived": self.survived,
        }


def capture_failure(error: BaseException) -> bytes:
    """Pickles an exception with its chain and tracebacks; what cannot be pickled is replaced by its description.

    Returns:
        Bytes for :func:`rebuild_exception`.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    links: list[tuple[bytes, str, dict[str, object] | None]] = []
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen and len(links) < 20:
        seen.add(id(link))
        frames = _user_frames(link.__traceback__)
        links.append((_pickle_exception(link), _joint(link), Traceback(frames).as_dict() if frames else None))
        link = link.__cause__ if _joint(link) == "cause" else link.__context__ if _joint(link) == "context" else None
    return pickle.dumps((_title(error), text, links))


def rebuild_exception(data: bytes | BaseException) -> BaseException:
    """The exception that :func:`capture_failure` pickled, with its chain and tracebacks."""
    if isinstance(data, BaseException):
        return data
    title, text, links = pickle.loads(data)
    below: BaseException | None = None
    for pickled, joint, frames in reversed(links):
        try:
            error = cast("BaseException", pickle.loads(pickled))
        except Exception:  # its class cannot be imported here, or does not take its own arguments
            error = RemoteError(f"{title}\n\n{text}")
        error.__traceback__ = Traceback.from_dict(frames).as_traceback() if frames else None
        if joint == "cause":
            error.__cause__ = below
        elif joint == "context":
            error.__context__ = below
        below = error
    assert below is not None
    return below


def classify(error: BaseException) -> FailureKind:
    """The class of an exception that a train function or its set-up raised."""
    if isinstance(error, StorageError) and not isinstance(error, CheckpointError):
        return FailureKind.STORAGE
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return FailureKind.STORAGE
    # PyTorch's has that name, and so have those of CuPy and JAX's and TensorFlow's allocators under other ones.
    if isinstance(error, MemoryError) or any(kind.__name__ in _OUT_OF_MEMORY for kind in type(error).__mro__):
        return FailureKind.OUT_OF_MEMORY
    return FailureKind.USER_ERROR


def describe_exit(exit_code: int | None) -> str:
    """How a process ended, in words.

    Args:
        exit_code: its exit status; negative for the number of a signal; None if unknown.
    """
    import signal

    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was ended by {name}"


def _title(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _joint(error: BaseException) -> str:
    """How an exception hangs on the one below it, as Python would show it."""
    if error.__cause__ is not None:
        return "cause"
    return "context" if error.__context__ is not None and not error.__suppress_context__ else ""


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drops the worker's own frames at the top, which say nothing to the user."""
    rest = frames
    while rest is not None and rest.tb_frame.f_globals.get("__name__", "").startswith("drivetrain."):
        rest = rest.tb_next
    return rest or frames


def _pickle_exception(error: BaseException) -> bytes:
    for form in (error, _WithoutInit(error)):
        try:
            pickled: bytes = cloudpickle.dumps(form)
            if isinstance(pickle.loads(pickled), type(error)):
                return pickled
        except Exception:  # anything may be raised by a user's class; the description below always pickles
            continue
    return pickle.dumps(RemoteError(f"{_title(error)} (the exception itself could not be pickled)"))


class _WithoutInit:
    """Pickles as an exception that is made again without calling its ``__init__``.

    By default an exception is unpickled by calling its class with ``args``, which fails for every class whose
    ``__init__`` takes anything else than it passes on.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        error = self._error
        return _make_without_init, (type(error), error.args, error.__dict__)


def _make_without_init(kind: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
