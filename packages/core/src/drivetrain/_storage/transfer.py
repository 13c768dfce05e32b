"""Moving many files with a bounded number of threads, a deadline, and retries after errors that may pass.

The threads are daemons: one that hangs in a call into a filesystem's library is named when the deadline is over, and
left behind, so that neither the wait nor the end of the process depends on it.
"""

from __future__ import annotations

import errno
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from drivetrain.errors import StorageError

__all__ = ["Job", "Limits", "is_transient", "run_jobs"]

T = TypeVar("T")

_ATTEMPTS = 8
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0

_TRANSIENT = {
    errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EPIPE, errno.ECONNREFUSED,
    errno.ECONNRESET, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN,
}  # fmt: skip
_PERMANENT = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_PERMANENT_WORDS = (
    "ACCESS_DENIED", "NO_SUCH_BUCKET", "NO_SUCH_KEY", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH",
    "UNRECOGNIZED_CLIENT", "MISSING_AUTHENTICATION_TOKEN", "NoSuchBucket", "AccessDenied", "Forbidden",
    "No response body", "INVALID_ACCESS", "Unable to locate credentials", "Anonymous",
)  # fmt: skip
_NETWORK_LIBRARIES = ("aiohttp", "aiobotocore", "azure", "botocore", "google", "paramiko", "requests", "urllib3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bounds of a transfer.

    Attributes:
        threads: files, or parts of big ones, that are moved at a time.
        deadline_s: seconds that one transfer may take.
        attempts: how often one file is tried.
        polite: give way to the threads that train.
    """

    threads: int = 8
    deadline_s: float = 1800.0
    attempts: int = _ATTEMPTS
    polite: bool = False


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """A piece of a transfer.

    Attributes:
        name: what messages call it.
        call: does it.
    """

    name: str
    call: Callable[[], T]


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, OSError):
        if error.errno is not None:
            return error.errno in _TRANSIENT
        return not any(word in str(error) for word in _PERMANENT_WORDS)
    return type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES


def run_jobs(jobs: Sequence[Job[T]], *, what: str, limits: Limits, in_thread: bool = True) -> list[T]:
    """Runs all jobs, several at a time.

    Args:
        jobs: the pieces.
        what: what they make up, for messages, such as ``"upload of checkpoint_000003"``.
        limits: the bounds.
        in_thread: False runs a single job, or all with one thread, on the calling thread, without a deadline.

    Returns:
        What each job returned.

    Raises:
        StorageError: a job failed for good, or the deadline is over; the message names the jobs.
    """
    deadline = time.monotonic() + limits.deadline_s
    if not in_thread and (len(jobs) == 1 or limits.threads == 1):
        values = []
        for job in jobs:
            try:
                values.append(_attempt(job, deadline, _sleep, limits.attempts))
            except StorageError:
                raise
            except Exception as error:
                raise _blame(what, job.name, error) from error
        return values
    gate = threading.Event()
    results: list[Any] = [None] * len(jobs)
    done: queue.SimpleQueue[tuple[int, Any, Exception | None]] = queue.SimpleQueue()
    numbers = iter(range(len(jobs)))
    lock = threading.Lock()
    current: dict[int, str] = {}

    def work() -> None:
        if limits.polite:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while not gate.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            current[number] = jobs[number].name
            try:
                done.put((number, _attempt(jobs[number], deadline, gate.wait, limits.attempts), None))
            except Exception as error:
                done.put((number, None, error))
                gate.set()
            finally:
                current.pop(number, None)

    for _ in range(min(limits.threads, len(jobs))):
        threading.Thread(target=work, daemon=True, name=f"drivetrain {what}").start()
    try:
        for finished in range(len(jobs)):
            try:
                number, value, failure = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty as empty:
                names = ", ".join(sorted(dict(current).values())[:5]) or "its threads"
                raise StorageError(
                    f"{what} took longer than {limits.deadline_s:g} s (SyncConfig.sync_timeout): "
                    f"{finished} of {len(jobs)} pieces are done, and {names} is waited for"
                ) from empty
            if isinstance(failure, StorageError):
                raise failure
            if failure is not None:
                raise _blame(what, jobs[number].name, failure) from failure
            results[number] = value
    finally:
        gate.set()
    return results


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _attempt(job: Job[T], deadline: float, wait: Callable[[float], bool], attempts: int) -> T:
    """Runs a job until it succeeds; `wait` waits for some seconds and returns True if another job failed meanwhile."""
    pause = _FIRST_PAUSE_S
    for attempt in range(1, attempts + 1):
        try:
            return job.call()
        except Exception as error:
            if attempt == attempts or not is_transient(error) or time.monotonic() + pause > deadline:
                raise
        if wait(pause * random.uniform(0.7, 1.3)):
            raise StorageError("given up, as another piece failed")
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    raise AssertionError("unreachable")


def _blame(what: str, job: str, error: Exception) -> StorageError:
    return StorageError(f"{what} failed at {job}: {explain(error)}")


def explain(error: BaseException) -> str:
    """A storage's error in a line, with what to do where that is known."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        text = error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += ". Make room, or keep fewer checkpoints (CheckpointConfig.num_to_keep)"
        elif error.errno == errno.EROFS:
            text += ". Mount it for writing, or choose another storage_path"
    elif any(word in text for word in ("NO_SUCH_BUCKET", "NoSuchBucket", "bucket does not exist")):
        text += ". Create the bucket, or mend storage_path"
    elif any(word in text for word in _PERMANENT_WORDS):
        text += ". Check the credentials (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role)"
    elif any(word in text for word in ("NETWORK_CONNECTION", "connect", "curlCode")):
        text += ". Check the endpoint and the network"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
