"""Runs each check in a separate process with a deadline, and kills processes that a check leaves running."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.check import Check

MINIMUM_S = 5.0
"""A check is not started if it would have less time than this."""
_EXIT_WAIT_S = 5.0
_DUMP_WAIT_S = 3.0
_LOG_LINES = 80
_MARK = "GPU_CHECK_MARK"


@dataclass(kw_only=True)
class Row:
    """The result of one check.

    Attributes:
        result: ``"passed"``, ``"failed"``, ``"skipped"``, or ``"not run"`` if there was no time left.
        reason: the reason of the result, unless it passed.
        log: the end of its output if it failed.
    """

    name: str
    title: str
    result: str
    seconds: float = 0.0
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs checks.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        gpus: the number of GPUs.
        environment: the environment variables of the check processes.
        directory: the directory for their files.
        deadline: the value of ``time.monotonic()`` by which all of them must have ended.
        jobs: the maximum number of checks that run at the same time.
    """

    device: str
    gpus: int
    environment: Mapping[str, str]
    directory: Path
    deadline: float
    jobs: int = 1

    def run_all(self, checks: Sequence[Check], done: Callable[[Row], None]) -> list[Row]:
        """Run the checks that must run alone one by one, then the others; return the rows in the order of the checks.

        Args:
            checks: the checks to run.
            done: called with each row as soon as its check has ended.
        """
        rows: dict[str, Row] = {}

        def run(check: Check) -> None:
            rows[check.name] = row = self.run(check)
            done(row)

        pool = ThreadPoolExecutor(self.jobs)
        try:
            for check in checks:
                if check.alone:
                    run(check)
            list(pool.map(run, [check for check in checks if not check.alone]))
        except BaseException:  # Ctrl-C, SIGTERM
            pool.shutdown(wait=False, cancel_futures=True)
            for pid in _marked(self._mark()):
                _kill(pid)
            raise
        finally:
            pool.shutdown()
        return [rows[check.name] for check in checks]

    def run(self, check: Check) -> Row:
        """Run one check until it ends or reaches its deadline."""
        if reason := self._obstacle(check):
            return Row(name=check.name, title=check.title, result="skipped", reason=reason)
        limit_s = min(check.limit_s, self.deadline - time.monotonic())
        if limit_s < min(MINIMUM_S, check.limit_s):
            reason = "the time limit of the whole command was reached"
            return Row(name=check.name, title=check.title, result="not run", reason=reason)
        directory = self.directory / check.name
        directory.mkdir()
        mark = self._mark(check.name)
        command = [
            *(sys.executable, "-m", "tests.gpu.child", check.module, check.function.__name__),
            *("--device", self.device, "--gpus", str(self.gpus), "--directory", str(directory)),
        ]
        started = time.monotonic()
        with (
            (directory / "log").open("wb") as log,
            _process(command, env={**self.environment, _MARK: mark}, stdout=log, stderr=log) as process,
        ):
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                process.send_signal(signal.SIGABRT)  # makes it write the stacks of its threads to the log
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_DUMP_WAIT_S)
        seconds = time.monotonic() - started
        remaining = _end_marked(mark, 0.0 if code is None else _EXIT_WAIT_S)
        row = Row(name=check.name, title=check.title, seconds=round(seconds, 1), **_outcome(directory))
        if code is None:
            row.result, row.reason = "failed", f"expected it to end within {limit_s:.0f} s; it was killed"
        elif code:
            row.reason = "; ".join(filter(None, [row.reason, f"expected exit code 0, got {_code(code)}"]))
            row.result = "failed"
        elif remaining and row.result != "failed":
            row.result = "failed"
            row.reason = f"expected no process after its end, got {remaining} still running {_EXIT_WAIT_S:.0f} s later"
        if row.result == "failed":
            row.log = _tail(directory / "log")
        shutil.rmtree(directory, ignore_errors=True)
        return row

    def _obstacle(self, check: Check) -> str:
        if missing := [name for name in check.packages if importlib.util.find_spec(name) is None]:
            return f"not installed: {', '.join(missing)}"
        if self.device == "cpu" and not check.on_cpu:
            return "requires a GPU, got --device cpu"
        if check.gpus > self.gpus:
            return f"requires {check.gpus} GPUs, got {self.gpus}"
        return ""

    def _mark(self, name: str = "") -> str:
        """Return the marker in the environment of a check's processes; without a name, the prefix of all markers."""
        return f"{self.directory}:{name};" if name else f"{self.directory}:"


@contextlib.contextmanager
def _process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a new session, and kill it at the end of the ``with`` block."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _outcome(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / "result.json").read_text())
    except FileNotFoundError:
        return {"result": "failed", "reason": "it ended without a result"}


def _code(code: int) -> str:
    return str(code) if code >= 0 else f"{code} ({signal.Signals(-code).name})"


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _end_marked(mark: str, wait_s: float) -> int:
    """Wait for the processes that inherited a marker, kill the remaining ones, and return their number."""
    deadline = time.monotonic() + wait_s
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
    remaining = _marked(mark)
    for pid in remaining:
        _kill(pid)
    return len(remaining)


def _marked(mark: str) -> list[int]:
    """Return the running processes whose environment has a marker with this prefix."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
    return pids


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
