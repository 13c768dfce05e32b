"""Whatever a train function does, the run ends in time, and states what happened.

By default, every fourth case runs on the local runtime. The session ``fuzz`` sets ``DRIVETRAIN_FUZZ=all``: then all
cases run, and on Ray too.
"""

import csv
import json
import os
from pathlib import Path

import pytest

import drivetrain
from drivetrain import DataParallelTrainer, FailureConfig, FailureKind, Result, RunConfig, ScalingConfig
from drivetrain.runs import RunReader
from tests.fuzz.cases import CASES, End
from tests.support import Collector, local_storage

RUNS_ALL = os.environ.get("DRIVETRAIN_FUZZ") == "all"
NAMES = list(CASES) if RUNS_ALL else list(CASES)[::4]
RUNTIMES = ("local", "ray") if RUNS_ALL else ("local",)
HANG_S = 5.0
KINDS = {
    End.USER_ERROR: FailureKind.USER_ERROR,
    End.LOST: FailureKind.INFRASTRUCTURE,
    End.OUT_OF_MEMORY: FailureKind.OUT_OF_MEMORY,
    End.PREEMPTED: FailureKind.PREEMPTION,
    End.HANG: FailureKind.HANG,
}


def train(config: dict[str, str]) -> object:
    rank = drivetrain.get_context().get_world_rank()
    for step in range(3):
        drivetrain.report({"step": step, "loss": 1 / (step + 1)})
        if rank == 1 and step == 0:
            return CASES[config["case"]].run()
    return None


@pytest.mark.timeout(180)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", NAMES)
def test_run_ends_as_it_should(name: str, runtime: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    ends, words = CASES[name].ends, CASES[name].words
    if runtime == "ray":
        if name == "process: SIGINT":
            pytest.skip("Ray has its own handler for this signal")
        if ends is End.LOST:
            words = "rank 1: the worker process"  # Ray does not know how its workers end
        request.getfixturevalue("ray_address")
    collector = Collector()
    result = DataParallelTrainer(
        train,
        train_loop_config={"case": name},
        scaling_config=ScalingConfig(num_workers=2, runtime=runtime),
        run_config=RunConfig(
            name="run",
            storage_path=tmp_path,
            verbose=0,
            callbacks=[collector],
            failure_config=FailureConfig(max_preemptions=0),
            hang_timeout_s=HANG_S if ends is End.HANG else None,
        ),
    ).fit(raise_on_failure=False)

    error = result.error
    if ends is End.SUCCESS:
        assert error is None, str(error)
        assert [metrics["step"] for metrics in collector.metrics_of(0)] == [0, 1, 2]
    else:
        assert isinstance(error, drivetrain.TrainingFailedError)
        assert error.kind is KINDS[ends], str(error)
        assert ends in (End.HANG, End.PREEMPTED) or error.rank == 1
        assert words in f"{error}\n{Path(result.path, 'error.txt').read_text()}"
    check_files(result, failed=error is not None)


def check_files(result: Result, *, failed: bool) -> None:
    """Check that every file of the run can be read again."""
    run = Path(result.path)
    if not failed or run.joinpath("result.json").exists():  # rank 1 may fail before the first report of rank 0
        for line in run.joinpath("result.json").read_text().splitlines():
            assert isinstance(json.loads(line), dict)
        with run.joinpath("progress.csv").open(newline="") as file:
            rows = list(csv.reader(file))
        assert {len(row) for row in rows} == {len(rows[0])}
    assert RunReader(local_storage(run)).record().status == ("failed" if failed else "finished")
    again = Result.from_path(run)
    assert (again.error is not None) == failed
    for checkpoint, _ in again.best_checkpoints:
        checkpoint.verify()
