"""Pickle an exception on a worker, rebuild it on the driver, and describe failures.

A worker's exception is pickled with its traceback, so that the driver can show the frames of the user's code.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

from drivetrain._base.limits import explain_limit
from drivetrain._base.redact import redact
from drivetrain._base.script import dumps_to_driver
from drivetrain._base.tracebacks import FrameRecord, as_traceback, records_of
from drivetrain.errors import CheckpointError, FailureKind, RemoteError, StorageError

__all__ = [
    "Failure",
    "behind_exit",
    "capture_failure",
    "describe_exit",
    "format_exception",
    "one_line",
    "rank_of",
    "rebuild_exception",
    "set_rank",
    "text_of",
    "type_name",
    "without_internal_frames",
]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PERMANENT_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_MAX_CHAINED = 20
_MAX_FRAMES = 100
_MAX_LINE = 2_000
_MAX_TEXT = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failure: its category, place, time and exception.

    Attributes:
        kind: the category, which decides whether a retry can help.
        summary: the message, in one line.
        rank: the world rank that failed; None if the failure was not on a single rank.
        phase: the phase that the rank was in when it failed.
        time: Unix time of the failure in seconds, by the clock of the machine on which it happened.
        exception: the exception, with its traceback.
        log_tail: the last lines of the rank's output, if the process could not report the failure itself, or if it
            called ``sys.exit()`` and its output was not shown.
        node_id: the node on which a process was lost; empty if no process was lost.
        survived: True if the other ranks were kept and only the lost ranks were replaced.
        made_progress: True if the run has committed a checkpoint since the previous failure.
        is_early: True if the attempt failed within ten minutes, and no rank had reported.
        attempt: the number of the attempt, as in :class:`~drivetrain.TrainContext`.
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
    made_progress: bool = False
    is_early: bool = False
    attempt: int = 0

    def repeats(self, before: Failure) -> bool:
        """Return True if this failure is the same mistake in the code as another one, without any progress.

        Two exceptions are the same if they have the same type, message and stack. Only types of Python itself count,
        because an exception of a library or of the user may describe a condition that passes. A long attempt may have
        made progress that the driver does not know.
        """
        if not all(each.kind is FailureKind.USER_ERROR and each.is_early for each in (self, before)):
            return False
        mistake = _mistake(self.exception)
        return mistake is not None and mistake == _mistake(before.exception)

    def record(self) -> dict[str, object]:
        """Return the fields of ``error.json`` that describe the failure."""
        return {
            "kind": self.kind.value,
            "rank": self.rank,
            "phase": self.phase,
            "time": self.time,
            "summary": self.summary,
            "exception": type(self.exception).__name__ if self.exception else None,
            "survived": self.survived,
        }


def _mistake(error: BaseException | None) -> tuple[str, str, list[tuple[str, int]]] | None:
    """Return the type, the message and the stack of an exception; None for an exception that a retry may avoid."""
    if error is None or error.__traceback__ is None:
        return None
    error = behind_exit(error)
    link: BaseException | None = error
    for _ in range(_MAX_CHAINED):
        if link is None:
            break
        is_temporary = isinstance(link, OSError) and not isinstance(link, _PERMANENT_ERRORS)
        if type(link).__module__ != "builtins" or is_temporary or _members_of(link):
            return None
        link = link.__cause__ or link.__context__
    stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return type_name(error), text_of(error), stack


def capture_failure(error: BaseException) -> bytes:
    """Pickle an exception with its traceback and its chain of causes and contexts.

    An exception that cannot be pickled is replaced by a :class:`~drivetrain.RemoteError` that describes it. This
    function never fails, because a failure that is not captured would look like a crash of the process.

    Returns:
        Bytes that :func:`rebuild_exception` accepts.
    """
    try:
        return _capture_chain(error)
    except BaseException:  # the exception's own methods may raise anything
        title = f"{type_name(error)} (the exception could not be described)"
        return pickle.dumps((title, "", [_Link(pickle.dumps(RemoteError(title)), "", [], [])]))


@dataclass(frozen=True, slots=True)
class _Link:
    """An exception of a chain.

    Attributes:
        pickled: the exception without its traceback.
        relation: see :func:`_relation`.
        frames: the frames of its traceback.
        members: the chains of the exceptions of an exception group.
    """

    pickled: bytes
    relation: str
    frames: list[FrameRecord]
    members: list[list[_Link]]


def _capture_chain(error: BaseException) -> bytes:
    return pickle.dumps((_title(error), format_exception(error), _links_of(error, set())))


def _links_of(error: BaseException, seen: set[int]) -> list[_Link]:
    links: list[_Link] = []
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _MAX_CHAINED:
        seen.add(id(link))
        relation = _relation(link)
        members = [_links_of(member, seen) for member in _members_of(link)]
        links.append(_Link(_pickle_exception(link), relation, records_of(_user_frames(link.__traceback__)), members))
        link = {"cause": link.__cause__, "context": link.__context__}.get(relation)
    return links


def rebuild_exception(data: bytes | BaseException) -> BaseException:
    """Return the exception that :func:`capture_failure` pickled, with its traceback and chain.

    An exception that cannot be unpickled here is replaced by a :class:`~drivetrain.RemoteError` with its text.

    Args:
        data: the pickle. An exception is returned unchanged.
    """
    if isinstance(data, BaseException):
        return data
    title, text, links = pickle.loads(data)
    errors = [_unpickled(link.pickled, f"{title}\n\n{text}") for link in links]
    _connect(errors, links)
    return errors[0]


def _unpickled(data: bytes, description: str) -> BaseException:
    try:
        return cast("BaseException", pickle.loads(data))
    except Exception:  # its class cannot be imported here, or its __init__ does not accept its args
        return RemoteError(description)


def _connect(errors: Sequence[BaseException], links: Sequence[_Link]) -> None:
    """Give the exceptions of a chain, and those of exception groups, their tracebacks and relations."""
    for number, (error, link) in enumerate(zip(errors, links, strict=True)):
        error.__traceback__ = as_traceback(link.frames)
        next_in_chain = errors[number + 1] if number + 1 < len(errors) else None
        if link.relation == "cause":
            error.__cause__ = next_in_chain
        elif link.relation == "context":
            error.__context__ = next_in_chain
        for member, chain in zip(_members_of(error), link.members, strict=False):
            if chain:
                rest = [_unpickled(each.pickled, type_name(member)) for each in chain[1:]]
                _connect([member, *rest], chain)


def set_rank(error: BaseException, rank: int) -> None:
    """Record on which rank an exception was raised."""
    with contextlib.suppress(Exception):  # a user's class may not allow further attributes
        error.drivetrain_rank = rank  # type: ignore[attr-defined]


def rank_of(error: BaseException) -> int | None:
    """Return the rank that :func:`set_rank` recorded; None if it recorded none."""
    rank: int | None = getattr(error, "drivetrain_rank", None)
    return rank


def behind_exit(error: BaseException) -> BaseException:
    """Return the exception that a script has handled by ``sys.exit()``; the given one if it is no ``SystemExit``."""
    while isinstance(error, SystemExit):
        hidden = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if hidden is None:
            break
        error = hidden
    return error


def classify(error: BaseException) -> FailureKind:
    """Return the category of an exception, without knowledge of any framework."""
    error = behind_exit(error)
    if isinstance(error, StorageError) and not isinstance(error, CheckpointError):
        return FailureKind.STORAGE
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return FailureKind.STORAGE
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return FailureKind.OUT_OF_MEMORY
    if explain_limit(error):
        return FailureKind.INFRASTRUCTURE
    return FailureKind.USER_ERROR


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process exited, such as ``was killed by SIGTERM``.

    Args:
        exit_code: the exit code of the process; the negative signal number if a signal killed it; None if unknown.
    """
    import signal

    if exit_code is None:
        return "exited"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"


def text_of(error: BaseException) -> str:
    """Return the message of an exception, which can always be printed and stored.

    The message is shortened if it is very long. Code points that cannot be encoded are escaped.
    """
    try:
        text = str(error)
    except BaseException:  # a user's __str__ may raise anything
        return "(its __str__ method raised an exception)"
    return _encodable(_shortened(text, _MAX_TEXT))


def type_name(error: BaseException) -> str:
    """Return the name of an exception's class."""
    try:
        return str(type(error).__name__)
    except BaseException:  # a metaclass may redefine it
        return "an exception"


def one_line(error: BaseException) -> str:
    """Return the type of an exception, and the first line of its message without credentials.

    If the exception stands for another one, which was raised in another process, belongs to a group or was handled by
    ``sys.exit()``, the line contains that exception too.
    """
    message = text_of(error).strip()
    first = message.split("\n", 1)[0]
    if reason := _reason(error, message):
        first = f"{first.rstrip(' .:')}: {reason}"
    text = redact(_shortened(first, _MAX_LINE))
    if limit := explain_limit(error):
        text = f"{text} ({limit})"
    line = f"{type_name(error)}: {text}" if text else type_name(error)
    hidden = behind_exit(error)
    return line if hidden is error else f"{line}, called after {one_line(hidden)}"


def _reason(error: BaseException, message: str) -> str:
    """Return the exception that another one stands for: the first of a group, or one whose traceback is in its message.

    Libraries raise such messages for exceptions of other processes, such as data loaders. The traceback ends with the
    exception, in the first line after the frames that is not indented.
    """
    try:
        grouped = getattr(error, "exceptions", None)
        if isinstance(grouped, tuple) and grouped and all(isinstance(each, BaseException) for each in grouped):
            others = f" and {len(grouped) - 1} more" if len(grouped) > 1 else ""
            return f"{one_line(grouped[0])}{others}"
    except BaseException:  # the attribute of a user's class may raise anything, and groups may be deeply nested
        return ""
    lines = message.split("\n")
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else []
    return next((line.strip() for line in after if line and not line.startswith(" ")), "")


def format_exception(error: BaseException) -> str:
    """Return the text that Python prints for an uncaught exception. It is shortened if it is very long."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # the exception's own methods may raise anything
        text = f"{one_line(error)} (its traceback could not be formatted)"
    return _encodable(_shortened(text, _MAX_TEXT))


def _shortened(text: str, limit: int) -> str:
    """Return a text without its middle part if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters omitted) ... {text[-half:]}"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _title(error: BaseException) -> str:
    return _encodable(_shortened("".join(traceback.format_exception_only(type(error), error)).strip(), _MAX_TEXT))


def _relation(error: BaseException) -> str:
    """Return how an exception refers to the next one in its chain: ``cause``, ``context`` or an empty string."""
    if error.__cause__ is not None:
        return "cause"
    return "context" if error.__context__ is not None and not error.__suppress_context__ else ""


def _members_of(error: BaseException) -> Sequence[BaseException]:
    """Return the exceptions of an exception group, which exists since Python 3.11."""
    is_group = isinstance(error, getattr(builtins, "BaseExceptionGroup", ()))
    return getattr(error, "exceptions", ()) if is_group else ()


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the outermost frames of drivetrain; with all frames if it has only such frames.

    Of a very long traceback, such as that of a ``RecursionError``, only the first and the last frames are kept.
    """
    remaining = frames
    while remaining is not None and remaining.tb_frame.f_globals.get("__name__", "").startswith("drivetrain."):
        remaining = remaining.tb_next
    entries: list[TracebackType] = []
    entry = remaining or frames
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if len(entries) > _MAX_FRAMES:
        entries[_MAX_FRAMES // 2 : -_MAX_FRAMES // 2] = []
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def without_internal_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of drivetrain and of the standard library."""
    kept = []
    while frames is not None:
        package = str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package != "drivetrain" and package not in sys.stdlib_module_names:
            kept.append(frames)
        frames = frames.tb_next
    remaining: TracebackType | None = None
    for entry in reversed(kept):
        remaining = TracebackType(remaining, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return remaining


def _pickle_exception(error: BaseException) -> bytes:
    for form in (error, _WithoutInit(error)):
        try:
            pickled = dumps_to_driver(form)
            if isinstance(pickle.loads(pickled), type(error)):
                return pickled
        except Exception:  # a user's class may raise any exception; the description below can always be pickled
            continue
    return pickle.dumps(RemoteError(f"{_title(error)} (the exception itself could not be pickled)"))


class _WithoutInit:
    """Pickles as an exception that is recreated without calling its ``__init__``.

    By default an exception is unpickled by calling its class with ``args``. That fails if the ``__init__`` of the class
    accepts other arguments than it passes to the base class.
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
