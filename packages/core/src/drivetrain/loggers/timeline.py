"""What happened to a run and when, a line for each event: ``timeline.jsonl`` in the run directory.

It is a record for people and tools that look at a run, now or later, and nothing that a run needs to go on. So a line
that cannot be written is left out, and whoever reads it does without what is not there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from drivetrain._base.outcome import outcome_of
from drivetrain._hooks.callback import Callback
from drivetrain._storage.layout import TIMELINE_FILE
from drivetrain._version import __version__
from drivetrain.loggers.usage import UsageRecorder

if TYPE_CHECKING:
    from pathlib import Path

    from drivetrain._base.failure import Failure
    from drivetrain._hooks.context import Run, WorkerInfo
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["FRAMEWORKS", "Timeline", "append_line", "installed_versions"]

FRAMEWORKS = (
    *(
        "torch",
        "torch_xla",
        "tensorflow",
        "keras",
        "jax",
        "lightning",
        "pytorch-lightning",
        "transformers",
        "accelerate",
    ),
    *("deepspeed", "xgboost", "xgboost-cpu", "lightgbm", "horovod", "ray", "numpy", "pandas", "pyarrow", "fsspec"),
)
"""The distributions whose versions are worth knowing."""

_TRACEBACK_CHARACTERS = 8000
_STOP_WAIT_S = 2.0


class Timeline(Callback):
    """Writes ``timeline.jsonl``: starts, attempts with their workers, checkpoints, failures and ends.

    While an attempt runs, it also has a :class:`~drivetrain.loggers.usage.UsageRecorder` note what the workers use.
    """

    def __init__(self) -> None:
        self._usage = UsageRecorder()
        self._packages: threading.Thread | None = None

    def on_run_start(self, run: Run) -> None:
        """Notes the start of a driver, and where it is."""
        self._note(run, "start", environment=_environment())
        # Looking at what is installed takes some ten milliseconds, for which no worker has to wait.
        self._packages = threading.Thread(
            target=lambda: self._note(run, "packages", packages=installed_versions()),
            daemon=True,
            name="drivetrain versions",
        )
        self._packages.start()

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Notes an attempt and its workers."""
        self._note(run, "attempt", attempt=attempt, workers=[asdict(worker) for worker in workers])
        self._usage.start(run.path, workers)

    def on_resume(self, run: Run, iteration: int) -> None:
        """Notes from where the attempt goes on."""
        self._note(run, "resume", iteration=iteration)

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Notes the commit."""
        self._note(run, "checkpoint", name=checkpoint.name, iteration=checkpoint.iteration)

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """Notes what ended the attempt, or what it has survived."""
        trace = ""
        if failure.exception is not None:
            trace = "".join(traceback.format_exception(failure.exception))[-_TRACEBACK_CHARACTERS:]
        self._note(run, "failure", failure=failure.record(), retrying=retrying, traceback=trace, log=failure.log_tail)

    def on_group_stop(self, run: Run, attempt: int) -> None:
        """Notes that the attempt is over."""
        self._usage.stop()
        self._note(run, "attempt end", attempt=attempt)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Notes how the run ended."""
        self._usage.stop()
        if self._packages is not None:
            self._packages.join(_STOP_WAIT_S)
        said = None if error is None else (str(error) or type(error).__name__).strip().partition("\n")[0]
        self._note(run, "end", outcome=outcome_of(error).value, error=said)

    def _note(self, run: Run, event: str, **facts: Any) -> None:
        append_line(run.path / TIMELINE_FILE, {"time": time.time(), "event": event, **facts})


def append_line(path: Path, facts: dict[str, Any]) -> None:
    """Appends a line of JSON to a local file; one that cannot be written is left out."""
    line = json.dumps(facts, default=str).encode() + b"\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            if end and os.pread(descriptor, 1, end - 1) != b"\n":  # a driver was killed in the middle of a line
                line = b"\n" + line
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _environment() -> dict[str, Any]:
    """Where this process runs."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "drivetrain": __version__,
        "script": sys.argv[0] if sys.argv else "",  # without its arguments, which may be secrets
        "directory": _working_directory(),
    }


@functools.cache
def installed_versions() -> dict[str, str]:
    """The versions of the :data:`FRAMEWORKS` that are installed, by distribution; none of them is imported."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in FRAMEWORKS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been deleted
        return ""
