import os
from typing import Any

import pytest

import drivetrain
from drivetrain import Callback, CallbackError, FailureConfig, TrainingFailedError
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import driver_only
from tests.contract.test_checkpoints import committed_names, report_files
from tests.support import Collector, Pipe, send_line, wait_for_release, wait_until_exited

HOOKS = (
    *("on_run_start", "on_group_start", "on_report", "on_checkpoint"),
    *("on_failure", "on_group_stop", "on_run_end"),
)


class Recorder(Callback):
    """Records which hooks are called, and raises in one of them on request."""

    def __init__(self, raise_in: str = "") -> None:
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.raise_in = raise_in


def _recorded(hook: str) -> Any:
    def record(self: Recorder, run: Any, *arguments: Any) -> None:
        self.calls.append(hook)
        self.arguments.append(arguments)
        if hook == self.raise_in:
            raise ArithmeticError(f"in {hook}")

    return record


for _hook in HOOKS:
    setattr(Recorder, _hook, _recorded(_hook))


def one_report_with_a_checkpoint() -> None:
    report_files({"step": 0}, {f"{drivetrain.get_context().get_world_rank()}.txt": "x"})


def test_hooks_are_called_in_the_documented_order(runtime: RuntimeUnderTest) -> None:
    recorder = Recorder()
    runtime.fit(one_report_with_a_checkpoint, callbacks=[recorder], workers=1)

    assert recorder.calls == [
        *("on_run_start", "on_group_start", "on_report", "on_checkpoint"),
        *("on_group_stop", "on_run_end"),
    ]
    assert recorder.arguments[-1] == (None,)
    attempt, workers = recorder.arguments[1]
    assert (attempt, [worker.rank for worker in workers]) == (0, [0])
    assert workers[0].pid > 0


def test_hooks_are_called_for_a_failure_and_the_next_attempt(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        raise ValueError

    recorder = Recorder()
    with pytest.raises(TrainingFailedError) as failed:
        runtime.fit(train, callbacks=[recorder], failure_config=FailureConfig(max_failures=1))

    calls = dict(enumerate(recorder.calls))
    assert set(recorder.calls) == set(HOOKS) - {"on_report", "on_checkpoint"}
    assert [call for call in recorder.calls if call != "on_failure"] == [
        *("on_run_start", "on_group_start", "on_group_stop", "on_group_start", "on_group_stop", "on_run_end")
    ]
    retrying = [recorder.arguments[place][1] for place, call in calls.items() if call == "on_failure"]
    assert retrying == [True, False]
    assert recorder.arguments[-1] == (failed.value,)


@driver_only
@pytest.mark.parametrize("hook", ["on_run_start", "on_group_start", "on_report", "on_checkpoint"])
def test_callback_that_raises_ends_the_run_and_every_callback_is_notified_of_the_end(
    runtime: RuntimeUnderTest, hook: str
) -> None:
    before, bad, after = Recorder(), Recorder(raise_in=hook), Recorder()

    with pytest.raises((TrainingFailedError, CallbackError), match=rf"Recorder\.{hook}\(\)") as failed:
        runtime.fit(
            one_report_with_a_checkpoint,
            callbacks=[before, bad, after],
            failure_config=FailureConfig(max_failures=3),
        )

    assert isinstance(failed.value.__cause__, ArithmeticError)
    assert before.calls[-1] == bad.calls[-1] == after.calls[-1] == "on_run_end"
    assert before.calls.count("on_run_start") == 1
    assert before.calls.count("on_group_start") <= 1, "a callback that raised was retried"


@driver_only
def test_callback_that_raises_at_the_end_does_not_prevent_other_callbacks(runtime: RuntimeUnderTest) -> None:
    bad, after = Recorder(raise_in="on_run_end"), Recorder()

    with pytest.raises(CallbackError, match="on_run_end"):
        runtime.fit(one_report_with_a_checkpoint, callbacks=[bad, after])

    assert after.calls[-1] == "on_run_end"


@driver_only
def test_callback_that_raises_at_the_end_does_not_hide_the_failure_of_the_run(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        raise ValueError("the reason")

    with pytest.raises(TrainingFailedError, match="the reason") as failed:
        runtime.fit(train, callbacks=[Recorder(raise_in="on_run_end")])

    assert isinstance(failed.value.__cause__, ValueError)


def test_callback_that_raises_leaves_no_worker(runtime: RuntimeUnderTest, pipe: Pipe, gate: Pipe) -> None:
    def train(config: dict) -> None:
        if drivetrain.get_context().get_world_rank() == 0:
            send_line(config["pipe"], os.getpid())
            drivetrain.report({"step": 0})
        else:
            send_line(config["pipe"], os.getpid())
            wait_for_release(config["gate"])

    with pytest.raises(TrainingFailedError, match="on_report"):
        runtime.fit(train, {"pipe": pipe.path, "gate": gate.path}, callbacks=[Recorder(raise_in="on_report")])

    if runtime.has_processes:
        wait_until_exited(pipe.receive_pids(1))


@driver_only
@pytest.mark.parametrize("condition", ["mapping", "function"])
def test_stop_condition_ends_the_run_successfully_with_the_checkpoint_of_its_report(
    runtime: RuntimeUnderTest, condition: str
) -> None:
    def train() -> None:
        rank = drivetrain.get_context().get_world_rank()
        step = 0
        while True:
            step += 1
            report_files({"step": step, "accuracy": step / 10}, {f"{rank}.txt": str(step)})

    def enough(trial_id: str, metrics: dict) -> bool:
        return len(trial_id) == 8 and metrics["accuracy"] >= 0.3

    result = runtime.fit(train, stop={"accuracy": 0.3, "never": 1} if condition == "mapping" else enough)

    assert result.error is None
    assert result.metrics["step"] >= 3
    assert "checkpoint_000003" in committed_names(result.path)


@driver_only
def test_stop_function_that_raises_fails_the_run_with_its_exception(runtime: RuntimeUnderTest) -> None:
    def train() -> None:
        drivetrain.report({"step": 0})

    def broken(trial_id: str, metrics: dict) -> bool:
        raise ArithmeticError("in the condition")

    collector = Collector()
    with pytest.raises(TrainingFailedError, match="stop") as failed:
        runtime.fit(train, stop=broken, callbacks=[collector], failure_config=FailureConfig(max_failures=2))

    assert isinstance(failed.value.__cause__, ArithmeticError)
    assert collector.attempts == 1
