"""Transfers many files with a bounded number of threads, a deadline, and retries after transient errors.

The threads are daemons. A thread that hangs in a call of a filesystem library is abandoned at the deadline, and the
error names the file that it was transferring. So a thread that hangs blocks neither the caller nor the exit of the
process.
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
_random = random.SystemRandom()  # not the global generator: a save must not change the numbers of the train function

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
    """The limits of a transfer.

    Attributes:
        threads: the maximum number of files, or parts of large files, that are transferred at the same time.
        deadline_s: the maximum duration of a transfer in seconds.
        attempts: the maximum number of attempts for each file or part.
        low_priority: lower the priority of the threads, in favor of the threads that train.
    """

    threads: int = 8
    deadline_s: float = 1800.0
    attempts: int = _ATTEMPTS
    low_priority: bool = False


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """A part of a transfer, such as a file.

    Attributes:
        name: the name of the part in messages.
        call: the function that transfers the part and returns the result.
    """

    name: str
    call: Callable[[], T]


def is_transient(error: BaseException) -> bool:
    """Return True if an operation that raised this error may succeed in a retry."""
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, OSError):
        if error.errno is not None:
            return error.errno in _TRANSIENT
        return not any(word in str(error) for word in _PERMANENT_WORDS)
    return type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES


def run_jobs(jobs: Sequence[Job[T]], *, what: str, limits: Limits, in_thread: bool = True) -> list[T]:
    """Run all jobs, several at a time.

    Args:
        jobs: the parts of the transfer.
        what: the name of the transfer in messages, such as ``"upload of checkpoint_000003"``.
        limits: the limits of the transfer.
        in_thread: True to run the jobs in new threads. False to run them on the calling thread if there is a single job
            or ``limits.threads`` is 1; then a job that hangs is not abandoned at the deadline.

    Returns:
        The result of each job, in the order of ``jobs``.

    Raises:
        StorageError: a job failed permanently, or the deadline passed. The message names the job, or unfinished jobs.
    """
    deadline = time.monotonic() + limits.deadline_s
    if not in_thread and (len(jobs) == 1 or limits.threads == 1):
        return [_attempt(job, what, deadline, _sleep, limits.attempts) for job in jobs]
    failed = threading.Event()
    results: list[Any] = [None] * len(jobs)
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    numbers = iter(range(len(jobs)))
    lock = threading.Lock()
    current: dict[int, str] = {}

    def work() -> None:
        if limits.low_priority:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while not failed.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            current[number] = jobs[number].name
            try:
                done.put((number, _attempt(jobs[number], what, deadline, failed.wait, limits.attempts), None))
            except BaseException as error:  # the calling thread raises it
                done.put((number, None, error))
                failed.set()
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
                    f"[DT-405] {what} took longer than {limits.deadline_s:g} s (SyncConfig.sync_timeout): "
                    f"{finished} of {len(jobs)} parts are complete, waiting for {names}"
                ) from empty
            if isinstance(failure, StorageError):
                raise failure
            if failure is not None:  # the job has called sys.exit()
                raise _describe_failure(what, jobs[number].name, failure) from failure
            results[number] = value
    finally:
        failed.set()
    return results


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _attempt(job: Job[T], what: str, deadline: float, wait: Callable[[float], bool], attempts: int) -> T:
    """Run a job, with retries. ``wait`` pauses for a number of seconds, and returns True if another job has failed."""
    mean = _FIRST_PAUSE_S
    for attempt in range(1, attempts + 1):
        pause = mean * _random.uniform(0.7, 1.3)
        try:
            return job.call()
        except Exception as error:
            if attempt == attempts or not is_transient(error) or time.monotonic() + pause > deadline:
                if isinstance(error, StorageError):
                    raise
                raise _describe_failure(what, job.name, error) from error
        if wait(pause):
            raise StorageError("cancelled, because another part failed")
        mean = min(2 * mean, _LONGEST_PAUSE_S)
    raise AssertionError("unreachable")


def _describe_failure(what: str, job: str, error: BaseException) -> StorageError:
    return StorageError(f"[DT-406] {what} failed at {job}: {explain(error)}")


def explain(error: BaseException) -> str:
    """Describe an error of a storage in one line, with a remedy if one is known."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        text = error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += ". Free disk space, or keep fewer checkpoints (CheckpointConfig.num_to_keep)"
        elif error.errno == errno.EROFS:
            text += ". Mount the filesystem read-write, or choose another storage_path"
    elif any(word in text for word in ("NO_SUCH_BUCKET", "NoSuchBucket", "bucket does not exist")):
        text += ". Create the bucket, or correct storage_path"
    elif any(word in text for word in _PERMANENT_WORDS):
        text += ". Check the credentials (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role)"
    elif any(word in text for word in ("NETWORK_CONNECTION", "connect", "curlCode")):
        text += ". Check the endpoint and the network"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
