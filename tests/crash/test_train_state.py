"""No state that ``TrainState`` has saved is lost whichever process is killed at any point of ``state.save``."""

import itertools
import os
import sys
from pathlib import Path

import pytest

from drivetrain_testing import CrashHarness
from drivetrain_testing._crash import POINTS, VICTIMS

JOB = Path(__file__).with_name("train_state_job.py")
ALL = int(os.environ.get("DRIVETRAIN_CRASHES", "6")) >= 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CrashHarness:
    command = [sys.executable, str(JOB), "--strategy", request.param]
    threads = {"OMP_NUM_THREADS": "1"}
    # The file of the state contains the same values, but a sharded index may list them in another order.
    return CrashHarness(
        tmp_path_factory.mktemp("crashes"), command=command, environment=threads, same_files=False, deadline_s=180
    )


# "mid-file" does not occur: the files of a state are moved to the run directory, which is on the same disk.
CASES = [
    (point, victim)
    for point, chosen in zip(POINTS, itertools.cycle(VICTIMS), strict=False)
    for victim in (VICTIMS if ALL else (chosen,))
    if point not in ("during sweep", "mid-file")
]


@pytest.mark.parametrize(("point", "victim"), CASES if ALL else CASES[::3])
def test_run_survives_a_kill_at_every_point_of_a_save(harness: CrashHarness, point: str, victim: str) -> None:
    assert all(harness.crash_at(point, victim, occurrence=3).killed)
