"""The driver is killed at every moment of a run; the next driver continues the run."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import with_processes
from tests.faults.scenarios import STEPS, Moment, Plan, train
from tests.faults.table import PROPERTY, Row
from tests.support import DEADLINE_S, Pipe, wait_until_exited

EXITED_S = 10.0
MEMORY = Path("/dev/shm")

DRIVER = """
import json, sys
from pathlib import Path
import drivetrain
from tests.faults.scenarios import Moment, Plan, train
from tests.support import release

class Watch(drivetrain.Callback):
    def on_group_start(self, run, attempt, workers):
        Path(given["directory"], "pids").write_text(" ".join(str(worker.pid) for worker in workers))

    def on_checkpoint(self, run, checkpoint):
        release(plan.commits)

given = json.loads(sys.argv[1])
plan = Plan(fault="driver killed", moment=Moment(given["moment"]), directory=given["directory"], pipe=given["pipe"])

drivetrain.DataParallelTrainer(
    train,
    train_loop_config={"plan": plan},
    scaling_config=drivetrain.ScalingConfig(num_workers=2, runtime=given["runtime"]),
    run_config=drivetrain.RunConfig(
        name="run",
        storage_path=given["runs"],
        verbose=0,
        callbacks=[Watch()],
        failure_config=drivetrain.FailureConfig(max_failures=1),
    ),
).fit()
"""


@pytest.fixture
def runs(tmp_path: Path, moment: Moment) -> Iterator[Path]:
    """The directory of the run; on a different device than TMPDIR for an upload that copies."""
    if moment is Moment.UPLOAD:
        if not MEMORY.is_dir():
            pytest.skip("an upload that is held requires a second filesystem")
        with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
            yield Path(directory)
    else:
        yield tmp_path / "runs"


@with_processes
@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.value)
def test_killed_driver_leaves_nothing_running_and_the_next_continues_from_the_committed_checkpoint(
    runtime: RuntimeUnderTest,
    moment: Moment,
    runs: Path,
    tmp_path: Path,
    pipe: Pipe,
    temporary_files: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if runtime.name == "ray" and moment in (Moment.FIRST, Moment.RESTART):
        pytest.skip("takes seconds to connect, and Ray handles the exit of a driver the same way at any moment")
    plan = Plan(fault="", moment=moment, directory=str(tmp_path))
    gates = [Pipe(Path(plan.gate(attempt, rank))) for attempt in range(2) for rank in range(2)]
    gates.append(Pipe(Path(plan.commits)))
    given = {"moment": moment.value, "directory": str(tmp_path), "pipe": pipe.path, "runs": str(runs)}
    driver = runtime.start_driver(DRIVER, given)
    pipe.receive()

    struck = time.monotonic()
    driver.kill()
    driver.wait_until_nothing_is_left(deadline_s=EXITED_S)
    wait_until_exited(map(int, (tmp_path / "pids").read_text().split()), deadline_s=EXITED_S)
    terminated_s = time.monotonic() - struck
    for gate in gates:
        gate.drain()
    runtime.storage_path = runs
    result = runtime.fit(train, {"plan": Plan(fault="", moment=Moment.FIRST, directory=str(tmp_path))}, resume="auto")
    for gate in gates:
        gate.close()

    row = Row("driver killed", moment.value, runtime.name, "resumed by the next driver", "", terminated_s, "")
    record_property(PROPERTY, [*row])
    assert result.return_value == moment.committed
    assert [entry["step"] for _, entry in result.best_checkpoints] == list(range(STEPS))
    assert not sorted(temporary_files.glob("drivetrain-*/*/*"))
    assert not Path(result.path, ".lock").exists()
    if runtime.name == "ray":
        wait_until_reservations_are_released()


def wait_until_reservations_are_released() -> None:
    from ray.util import placement_group_table

    deadline = time.monotonic() + DEADLINE_S
    while {group["state"] for group in placement_group_table().values()} - {"REMOVED"}:
        assert time.monotonic() < deadline, placement_group_table()
