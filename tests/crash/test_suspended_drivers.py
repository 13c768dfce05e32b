"""A driver is suspended at random moments, and another one takes its run over: nothing that was committed is lost.

The drivers behave as on different machines, on a filesystem whose locks are only valid on each of them. By default,
there are 4 suspensions; ``DRIVETRAIN_SUSPENSIONS=200`` makes it 200.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain._storage.checkpoint import checkpoint_in
from drivetrain._storage.manifest import read_manifest
from drivetrain.runs import open_run
from tests.support import DEADLINE_S, local_storage, python_path

SUSPENSIONS = int(os.environ.get("DRIVETRAIN_SUSPENSIONS", "4"))
LONGEST_S = 0.6
"""The longest time between the first commit of a driver and its suspension."""

pytestmark = pytest.mark.timeout(300 + 30 * SUSPENSIONS)

DRIVER = """
import sys, tempfile, time
from functools import partial
from pathlib import Path

import drivetrain
from drivetrain import CheckpointConfig, DataParallelTrainer, RunConfig, RunInUseError
from drivetrain._storage import holder, lock, rundir

number, storage_path = sys.argv[1:]
holder.machine = lambda: f"machine {number}"
lock.try_lock = lambda descriptor, kind: True
rundir.RunLock = partial(lock.RunLock, beat_s=0.1)


def train(config):
    checkpoint = drivetrain.get_checkpoint()
    step = 0 if checkpoint is None else int(Path(checkpoint.path, "step").read_text())
    while not Path(config["end"]).exists():
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            drivetrain.report({"step": step, "driver": config["number"]}, checkpoint=drivetrain.Checkpoint(directory))
        time.sleep(0.01)


trainer = DataParallelTrainer(
    train,
    train_loop_config={"number": int(number), "end": f"{storage_path}/end"},
    run_config=RunConfig(
        name="run",
        storage_path=storage_path,
        resume="auto",
        verbose=0,
        checkpoint_config=CheckpointConfig(num_to_keep=50),
    ),
)
try:
    trainer.fit()
except drivetrain.TrainingFailedError as error:
    sys.exit("taken over" if "[DT-705]" in str(error) else repr(error))
except RunInUseError as error:
    sys.exit("taken over" if "[DT-705]" in str(error) else repr(error))
"""


class Drivers:
    """The drivers of one run, which take it over from each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[str]] = []

    def start(self) -> int:
        """Start the next driver, and return its number once it has committed a checkpoint."""
        number = len(self._started)
        self._started.append(
            subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(number), str(self.directory)],
                env={**os.environ, "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        deadline = time.monotonic() + DEADLINE_S
        while number not in self.committed().values():
            assert self._started[number].poll() is None, self._started[number].communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return number

    def signal(self, number: int, which: signal.Signals) -> None:
        self._started[number].send_signal(which)

    def end_of(self, number: int) -> tuple[int, str]:
        """Return the exit status of a driver, and the last line that it has written."""
        _, errors = self._started[number].communicate(timeout=DEADLINE_S)
        return self._started[number].returncode, errors.strip().rpartition("\n")[2]

    def committed(self) -> dict[int, int]:
        """Return the driver of each committed checkpoint, by the checkpoint's step."""
        entries = read_manifest(local_storage(self.directory / "run"))
        return {entry.metrics["step"]: entry.metrics["driver"] for entry in entries}

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Drivers]:
    with contextlib.closing(Drivers(tmp_path)) as drivers:
        yield drivers


def steps_in(file: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, file.read_text().splitlines())


def test_driver_that_was_suspended_changes_nothing_of_the_driver_that_has_taken_over(drivers: Drivers) -> None:
    chosen = random.Random(5)
    current = drivers.start()
    for _ in range(SUSPENSIONS):
        time.sleep(chosen.uniform(0.0, LONGEST_S))
        drivers.signal(current, signal.SIGSTOP)
        before = drivers.committed()
        suspended, current = current, drivers.start()
        during = drivers.committed()
        assert min(step for step, driver in during.items() if driver == current) > max(before)

        drivers.signal(suspended, signal.SIGCONT)
        assert drivers.end_of(suspended) == (1, "taken over")
        after = drivers.committed()
        assert set(after.values()) - set(during.values()) <= {current}
        assert max(after) >= max(during)
        assert {step for step, driver in after.items() if driver == suspended} <= set(before)

    (drivers.directory / "end").touch()
    assert drivers.end_of(current)[0] == 0
    record = open_run(drivers.directory / "run").record()
    assert record.status == "finished"
    steps = [line["step"] for line in steps_in(drivers.directory / "run" / "result.json")]
    assert sorted(set(steps)) == list(range(1, steps[-1] + 1)), "a report is missing"
    assert len(steps) - len(set(steps)) <= SUSPENSIONS, "a suspended driver wrote more than the report in its hands"
    storage = local_storage(drivers.directory / "run")
    for entry in read_manifest(storage):
        checkpoint_in(storage, entry.name).verify()
