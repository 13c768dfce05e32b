"""Runs a driver in a process of its own, which the conformance kit for runtimes interrupts or kills."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain.plugin import Runtime
from drivetrain_testing._jobs import END_S, find_running
from drivetrain_testing._runtimejobs import CallsWhenAllReported, wait_after_report

__all__ = ["Driver", "start_driver"]

_START_S = 120.0


class Driver:
    """A driver whose train function has started on all ranks.

    Args:
        process: the process of the driver.
        mark: an environment variable that the driver and the processes that inherit its environment have.
        pids: the process ids of the ranks.
    """

    def __init__(self, process: subprocess.Popen[str], mark: str, pids: list[int]) -> None:
        self._process = process
        self._mark = mark
        self._pids = pids

    def interrupt(self) -> str:
        """Send Ctrl-C as a terminal does: to the whole process group. Return the standard error of the driver."""
        os.killpg(self._process.pid, signal.SIGINT)
        return self._process.communicate(timeout=2 * END_S)[1]

    def kill(self) -> None:
        """Send SIGKILL to the driver alone."""
        self._process.kill()
        self._process.wait()

    def find_running(self) -> list[int]:
        """Return the ids of processes of the run that do not exit in time."""
        others = [pid for pid in self._pids if pid != self._process.pid]
        return find_running([*others, *_marked(self._mark)])

    def clean_up(self) -> None:
        """Kill the processes that are still running."""
        self._process.kill()
        self._process.communicate()
        for pid in _marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def start_driver(
    runtime: str | type[Runtime], num_workers: int, directory: Path, environment: Mapping[str, str]
) -> Iterator[Driver]:
    """Start a driver, and wait until its train function runs on all ranks.

    Args:
        runtime: the name of a runtime, or a runtime class that can be imported.
        num_workers: the number of workers.
        directory: the storage path of the run.
        environment: further environment variables of the driver.
    """
    name, mark = "DRIVETRAIN_KIT_MARK", secrets.token_hex(8)
    given = {
        "runtime": runtime if isinstance(runtime, str) else [runtime.__module__, runtime.__qualname__],
        "num_workers": num_workers,
        "storage_path": str(directory),
    }
    # A process group of its own, so that Ctrl-C reaches only this driver.
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(given)],
        env={**os.environ, **environment, name: mark, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    driver = Driver(process, f"{name}={mark}", [])
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            process.kill()
            errors = process.communicate()[1]
            raise AssertionError(f"expected the ranks to report within {_START_S:g} s, got:\n{errors}")
        yield Driver(process, f"{name}={mark}", json.loads(line))
    finally:
        driver.clean_up()


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # the process has exited, or belongs to another user
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def main() -> None:
    """Run a train function that reports and then waits. Print the process ids of the ranks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have made it ignored
    given: dict[str, Any] = json.loads(sys.argv[1])
    runtime = given["runtime"]
    if not isinstance(runtime, str):
        module, name = runtime
        runtime = getattr(importlib.import_module(module), name)()
    callback = CallsWhenAllReported(lambda pids: print(json.dumps(pids), flush=True))
    DataParallelTrainer(
        wait_after_report,
        scaling_config=ScalingConfig(num_workers=given["num_workers"], runtime=runtime),
        run_config=RunConfig(
            name="run",
            storage_path=given["storage_path"],
            verbose=0,
            worker_output="none",
            callbacks=[callback],
            start_timeout_s=_START_S,
        ),
    ).fit()
    raise AssertionError(f"expected fit() to be interrupted, but it returned at {time.time():.0f}")
