"""Writes the timeline of a run, whose format is defined in :mod:`drivetrain._storage.timeline`."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from drivetrain._base.failure import format_exception, text_of, type_name
from drivetrain._base.outcome import outcome_of
from drivetrain._hooks.callback import Callback
from drivetrain._plugins.node import gpu_driver, gpu_models
from drivetrain._storage.timeline import (
    AttemptEnded,
    AttemptFailed,
    AttemptResumed,
    AttemptStarted,
    CheckpointCommitted,
    DriverStarted,
    RunEnded,
    VersionsFound,
    append_record,
    find_lost_attempt,
)
from drivetrain._version import __version__
from drivetrain.errors import StorageError
from drivetrain.loggers.usage import UsageRecorder
from drivetrain.loggers.versions import installed_versions

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain._hooks.context import Run, WorkerInfo
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["Timeline"]

_TRACEBACK_CHARACTERS = 8000
_STOP_WAIT_S = 2.0


class Timeline(Callback):
    """Writes ``timeline.jsonl``: starts and ends of drivers, attempts and their workers, checkpoints and failures.

    While an attempt runs, a :class:`~drivetrain.loggers.usage.UsageRecorder` also records the workers' resource usage.
    """

    def __init__(self) -> None:
        self._usage = UsageRecorder()
        self._packages: threading.Thread | None = None

    def on_run_start(self, run: Run) -> None:
        """Record the start of this driver, and its environment. Complete the record of a driver that was killed."""
        with contextlib.suppress(StorageError):  # the timeline is damaged, which no run needs
            if (lost := find_lost_attempt(run.storage)) is not None:
                append_record(run.path, lost)
        append_record(run.path, DriverStarted(environment=_environment()))
        # Listing the installed packages takes tens of milliseconds, which must not delay the workers.
        packages = threading.Thread(
            target=lambda: append_record(run.path, VersionsFound(packages=installed_versions())),
            daemon=True,
            name="drivetrain versions",
        )
        packages.start()
        self._packages = packages

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Record an attempt and its workers."""
        append_record(run.path, AttemptStarted(attempt=attempt, workers=_records(workers)))
        self._usage.start(run.path, workers)

    def on_resume(self, run: Run, iteration: int) -> None:
        """Record the iteration from which the attempt resumes."""
        append_record(run.path, AttemptResumed(iteration=iteration))

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Record the committed checkpoint."""
        append_record(run.path, CheckpointCommitted(name=checkpoint.name, iteration=checkpoint.iteration))

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """Record the failure that ended the attempt, or that the attempt survived."""
        trace = ""
        if failure.exception is not None:
            trace = format_exception(failure.exception)[-_TRACEBACK_CHARACTERS:]
        record = AttemptFailed(failure=failure.record(), retrying=retrying, traceback=trace, log=failure.log_tail)
        append_record(run.path, record)

    def on_group_stop(self, run: Run, attempt: int) -> None:
        """Record the end of the attempt."""
        self._usage.stop()
        append_record(run.path, AttemptEnded(attempt=attempt))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Record how the run ended."""
        self._usage.stop()
        if self._packages is not None:
            self._packages.join(_STOP_WAIT_S)
        message = None if error is None else (text_of(error) or type_name(error)).strip().partition("\n")[0]
        append_record(run.path, RunEnded(outcome=outcome_of(error).value, error=message))


def _records(workers: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
    """Return the fields of workers. Ranks with the same versions as rank 0 are recorded without them."""
    records = [asdict(worker) for worker in workers]
    for record in records[1:]:
        if record["versions"] == records[0]["versions"]:
            del record["versions"]
    return records


def _environment() -> dict[str, Any]:
    """Return information about this process and its machine."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "drivetrain": __version__,
        "script": sys.argv[0] if sys.argv else "",  # without its arguments, which may contain secrets
        "directory": _working_directory(),
        "gpus": list(gpu_models()),
        "gpu_driver": gpu_driver(),
    }


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the directory has been deleted
        return ""
