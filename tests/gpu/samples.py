"""Checks with known results, which ``test_command.py`` runs with ``--module tests.gpu.samples``."""

import os
import subprocess
import sys
import threading

import drivetrain
from tests.gpu.check import Figures, Run, Skip, check, equal
from tests.support import send_line

SAMPLE_PIPE = "SAMPLE_PIPE"
"""The variable with the path of a :class:`~tests.support.Pipe` that receives the id of the process of ``hangs``."""
WAITS = "import signal; signal.pause()"


def report_position() -> int:
    context = drivetrain.get_context()
    drivetrain.report({"rank": context.get_world_rank()})
    return context.get_world_size()


@check()
def trains(run: Run) -> Figures:
    """Trains on CPU workers that replace GPUs"""
    equal("world size", run.fit(report_position, workers=run.workers()).return_value, 2)
    return {"workers": 2}


@check()
def fails(run: Run) -> None:
    """Raises an exception"""
    print("printed before the failure", flush=True)
    raise ValueError("expected 1, got 2\nmore | on another line")


@check(limit_s=12)
def hangs(run: Run) -> None:
    """Waits forever, together with a process that it has started in a separate session"""
    process = subprocess.Popen([sys.executable, "-c", WAITS], start_new_session=True)
    if path := os.environ.get(SAMPLE_PIPE):
        send_line(path, process.pid)
    threading.Event().wait()


@check()
def crashes(run: Run) -> None:
    """Aborts"""
    os.abort()


@check()
def leaves_a_process(run: Run) -> None:
    """Returns while a process that it has started keeps running"""
    subprocess.Popen([sys.executable, "-c", WAITS], start_new_session=True)


@check(packages=("json", "no_such_package"))
def needs_a_package(run: Run) -> None:
    """Needs a package that does not exist"""


@check(gpus=64)
def needs_more_gpus(run: Run) -> None:
    """Needs more GPUs than there are"""


@check(on_cpu=False)
def needs_a_gpu(run: Run) -> None:
    """Cannot run on the CPU"""


@check(alone=True)
def skips_itself(run: Run) -> None:
    """Detects itself that it cannot run"""
    raise Skip("built without support")
