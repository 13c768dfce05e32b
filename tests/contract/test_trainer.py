"""The interactive trainer: run after run on the same workers."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import drivetrain
import drivetrain_interactive
from drivetrain import TrainingFailedError
from drivetrain_interactive import Trainer
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import same_on_ray, with_processes
from tests.support import Collector, Pipe, is_running, wait_until_exited

DRIVER = """
import json, os, sys
from drivetrain_interactive import Trainer
from tests.support import send_line, wait_for_release
given = json.loads(sys.argv[1])
trainer = Trainer("none", given["num_workers"], runtime=given["runtime"], logdir=given["storage_path"])
try:
    trainer.run(lambda: (send_line(given["pipe"], os.getpid()), wait_for_release(given["gate"])))
except KeyboardInterrupt:
    for pid in trainer.run(os.getpid):
        send_line(given["pipe"], pid)
    wait_for_release(given["gate"])
"""


@pytest.fixture
def trainer(runtime: RuntimeUnderTest) -> Iterator[Trainer]:
    scaling = runtime.scaling()
    with Trainer("none", scaling.min_workers, logdir=runtime.storage_path / "logs", runtime=runtime.name) as made:
        yield made


@with_processes
def test_next_run_reuses_the_workers_and_has_its_own_logs(trainer: Trainer) -> None:
    def train(config: dict) -> int:
        print("this is", config["name"])
        return os.getpid()

    pids = trainer.run(train, {"name": "one"})
    first = trainer.latest_run_dir
    assert trainer.run(train, {"name": "two"}) == pids

    for directory, name in ((first, "one"), (trainer.latest_run_dir, "two")):
        for rank in range(2):
            assert Path(directory, "logs", f"rank_{rank}.log").read_text() == f"this is {name}\n"
    trainer.shutdown()
    wait_until_exited(pids)


@with_processes
@same_on_ray
def test_exception_is_not_retried_and_the_next_run_has_new_workers(trainer: Trainer) -> None:
    collector = Collector()
    pids = trainer.run(os.getpid)

    with pytest.raises(TrainingFailedError, match="division by zero") as raised:
        trainer.run(lambda: 1 / 0, callbacks=[collector])

    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert collector.attempts == 1
    wait_until_exited(pids)
    assert not {*trainer.run(os.getpid)} & {*pids}


@with_processes
def test_run_that_loses_a_worker_resumes_from_its_checkpoint(trainer: Trainer) -> None:
    def train() -> tuple:
        steps = range((drivetrain_interactive.load_checkpoint() or {"step": 0})["step"] + 1, 4)
        for step in steps:
            drivetrain.report(step=step)
            drivetrain_interactive.save_checkpoint(step=step)
            if step == 2 and drivetrain_interactive.world_rank() == 0:
                deadline = time.monotonic() + 30
                manifest = Path(drivetrain.get_context().get_run_dir(), "manifest.json")
                while not manifest.exists() or "checkpoint_000004" not in manifest.read_text():
                    assert time.monotonic() < deadline
                os.kill(os.getpid(), signal.SIGKILL)
        return list(steps)

    collector = Collector()
    assert trainer.run(train, callbacks=[collector])[0] == [3]

    assert collector.attempts == 2
    assert [(m["step"], m["_training_iteration"]) for m in collector.metrics_of(0)] == [(1, 1), (2, 2), (3, 3)]
    assert trainer.latest_checkpoint == {"step": 3}


@with_processes
def test_worker_lost_between_runs_is_replaced(trainer: Trainer) -> None:
    pids = trainer.run(os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    wait_until_exited(pids[1:])

    assert len({*trainer.run(os.getpid), *pids}) == 4


@with_processes
def test_run_after_an_edit_of_an_imported_module_uses_the_new_code(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> tuple:
        import edited_between_runs

        return os.getpid(), edited_between_runs.VALUE

    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_between_runs.py"
    module.write_text("VALUE = 1")
    trainer.run(os.getpid)
    before = trainer.run(train)
    module.write_text("VALUE = 10")
    after = trainer.run(train)

    assert [value for _, value in before + after] == [1, 1, 10, 10]
    assert trainer.run(train) == after
    sys.modules.pop("edited_between_runs", None)


@with_processes
def test_ctrl_c_ends_only_the_run_and_a_kill_of_the_driver_leaves_no_process(
    runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe
) -> None:
    driver = runtime.start_driver(DRIVER, {"pipe": pipe.path, "gate": gate.path})
    interrupted = pipe.receive_pids(2)

    driver.interrupt()

    idle = pipe.receive_pids(2)
    wait_until_exited(interrupted)
    assert all(map(is_running, idle))

    driver.kill()

    wait_until_exited(idle)
    driver.wait_until_nothing_is_left()
