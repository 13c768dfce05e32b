"""No committed checkpoint is lost whichever process is killed at any time, on a local disk and on a real S3 server.

By default, each storage is tested with 6 random kills, and with a kill of one victim (on the local disk, two) at each
point of the protocol. ``DRIVETRAIN_CRASHES=200`` makes it 200 random kills, and all four victims on the local disk.
"""

import itertools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain_testing._crash import POINTS, VICTIMS, Crash, CrashFound, CrashHarness
from tests.s3 import FaultProxy, S3Server

CRASHES = int(os.environ.get("DRIVETRAIN_CRASHES", "6"))
SEED = int(os.environ.get("DRIVETRAIN_CRASH_SEED", "3"))

pytestmark = pytest.mark.timeout(300 + 30 * CRASHES)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> CrashHarness:
    return CrashHarness(tmp_path_factory.mktemp("crashes"))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashHarness]:
    directory = tmp_path_factory.mktemp("crashes_on_s3")
    with (
        S3Server(directory / "served") as server,
        FaultProxy(server, markers=True) as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        server.make_bucket("bucket")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield CrashHarness(directory, storage_path=proxy.uri("bucket/crashes"))


def random_crashes(harness: CrashHarness) -> Iterator[list[Crash]]:
    """Return up to three crashes of one run, at moments between its start and its end."""
    chosen, left = random.Random(SEED), CRASHES
    while left > 0:
        count = min(left, chosen.randint(1, 3))
        yield [Crash(chosen.choice(VICTIMS), after_s=chosen.uniform(0.0, harness.duration_s)) for _ in range(count)]
        left -= count


def local_cases() -> Iterator[tuple[str, str]]:
    """Yield each point with its victims: all, or by default two, of which one leaves the driver running."""
    pairs = itertools.cycle([("driver", "workers"), ("both", "worker")])
    for point, pair in zip(POINTS, pairs, strict=False):
        for victim in VICTIMS if CRASHES >= 200 else pair:
            if point != "during sweep" or victim in ("driver", "both"):  # a sweep ends before workers exist
                yield point, victim


@pytest.mark.parametrize(("point", "victim"), list(local_cases()))
def test_run_on_a_local_disk_survives_a_kill_at_every_point_of_the_protocol(
    local: CrashHarness, point: str, victim: str
) -> None:
    report = local.crash_at(point, victim, occurrence=3)

    assert all(report.killed)


@pytest.mark.parametrize(
    ("point", "victim"), [(point, VICTIMS[number % 4]) for number, point in enumerate(POINTS[:-1])]
)
def test_run_in_a_bucket_survives_a_kill_at_every_point_of_the_protocol(
    bucket: CrashHarness, point: str, victim: str
) -> None:
    report = bucket.crash_at(point, victim, occurrence=2)

    assert all(report.killed)


def test_run_in_a_bucket_survives_a_kill_during_a_sweep(bucket: CrashHarness) -> None:
    assert all(bucket.crash_at("during sweep", "both").killed)


@pytest.mark.slow
def test_run_on_a_local_disk_survives_kills_at_random_instants(local: CrashHarness) -> None:
    for crashes in random_crashes(local):
        local.crash(*crashes)


@pytest.mark.slow
@pytest.mark.campaign
def test_run_in_a_bucket_survives_kills_at_random_instants(bucket: CrashHarness) -> None:
    for crashes in random_crashes(bucket):
        bucket.crash(*crashes)


FORGETFUL = """
import sys, pathlib, drivetrain, tempfile

def train():
    checkpoint = drivetrain.get_checkpoint()
    start = 0
    if checkpoint is not None and {resumes}:
        start = int(pathlib.Path(checkpoint.path, "step").read_text())
    for step in range(start + 1, 31):
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, "step").write_text(str(step))
            drivetrain.report({{"step": step}}, drivetrain.Checkpoint(directory))

drivetrain.DataParallelTrainer(
    train,
    scaling_config=drivetrain.ScalingConfig(num_workers=2, runtime="local"),
    run_config=drivetrain.RunConfig(
        name="run", resume="auto", failure_config=drivetrain.FailureConfig(max_failures=3)
    ),
).fit()
"""


@pytest.mark.parametrize("resumes", [True, False])
def test_harness_detects_a_job_that_does_not_resume_from_its_checkpoint(tmp_path: Path, resumes: bool) -> None:
    job = tmp_path / "job.py"
    job.write_text(FORGETFUL.format(resumes=resumes))
    harness = CrashHarness(tmp_path, command=[sys.executable, str(job)])

    if resumes:
        assert harness.crash_at("after manifest write", occurrence=10).killed == (1,)
        return
    with pytest.raises(CrashFound, match="expected iteration 30"):
        harness.crash_at("after manifest write", occurrence=10)


def test_harness_detects_files_damaged_by_other_code(tmp_path: Path) -> None:
    """The job empties a file of every checkpoint when it restarts."""
    job = tmp_path / "job.py"
    damage = """
import os, pathlib
for file in pathlib.Path(os.environ["DRIVETRAIN_STORAGE_PATH"]).glob("run/checkpoint_*/step"):
    file.write_text("")
"""
    job.write_text(damage + FORGETFUL.format(resumes=True))

    with pytest.raises(CrashFound, match="is damaged"):
        CrashHarness(tmp_path, command=[sys.executable, str(job)]).crash_at("after manifest write", occurrence=10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"point": "at noon"}, "expected one of before upload"),
        ({"victim": "bystander", "after_s": 1.0}, "expected one of driver"),
        ({}, "either point or after_s"),
        ({"point": "mid-file", "after_s": 1.0}, "either point or after_s"),
    ],
)
def test_impossible_crash_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Crash(**arguments)
