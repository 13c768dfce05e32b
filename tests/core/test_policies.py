"""Failure policies: the forms in which they are given, their decisions, delays and errors."""

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Callback,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    PluginBrokenError,
    PluginNotFoundError,
    Result,
    RunCancelledError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain._base.failure import Failure
from drivetrain._driver.callbacks import make_callbacks
from drivetrain._driver.policies import RetryBudget, make_policy
from tests.support import Collector

Install = Callable[[str, str, str, dict[str, dict[str, str]]], None]


def failure(kind: FailureKind = FailureKind.PREEMPTION, *, made_progress: bool = False) -> Failure:
    return Failure(kind=kind, summary="", made_progress=made_progress)


def decisions(config: FailureConfig, failures: list[Failure]) -> list[bool | float]:
    policy = RetryBudget(config)
    return [policy.decide(latest, failures[:number]) for number, latest in enumerate(failures)]


def test_retries_without_progress_wait_longer_each_time_up_to_a_minute() -> None:
    config = FailureConfig(retry_backoff_s=10, max_preemptions_without_progress=-1)
    assert decisions(config, [failure()] * 6) == [0, 10, 20, 40, 60, 60]
    assert decisions(config, [failure()] * 3_000)[-1] == 60


def test_progress_resets_the_delay() -> None:
    config = FailureConfig(retry_backoff_s=10)
    failures = [failure(), failure(), failure(made_progress=True), failure(), failure()]
    assert decisions(config, failures) == [0, 10, 0, 0, 10]


def test_preemptions_without_progress_are_limited() -> None:
    config = FailureConfig(retry_backoff_s=1, max_preemptions_without_progress=2)
    assert decisions(config, [failure()] * 3) == [0, 1, False]
    assert decisions(config, [failure(made_progress=True)] * 50) == [0.0] * 50


def test_failures_do_not_count_as_preemptions_without_progress() -> None:
    config = FailureConfig(max_failures=-1, max_preemptions_without_progress=1)
    died = failure(FailureKind.INFRASTRUCTURE)
    assert decisions(config, [died, died, died, failure()])[-1] is not False


def raised(source: str, **given: Any) -> Failure:
    try:
        exec(compile(source, "train.py", "exec"), {})
    except BaseException as error:
        return Failure(**{"kind": FailureKind.USER_ERROR, "summary": "", "exception": error, "is_early": True, **given})
    raise AssertionError


@pytest.mark.parametrize(
    ("first", "second", "is_retried"),
    [
        (raised("undefined"), raised("undefined"), False),
        (raised("open('/missing/file')"), raised("open('/missing/file')"), False),
        (
            raised("try:\n  1 / 0\nexcept Exception:\n  exit(1)"),
            raised("try:\n  1 / 0\nexcept Exception:\n  exit(3)"),
            False,
        ),
        (raised("undefined"), raised("\nundefined"), True),
        (raised("raise ValueError(1)"), raised("raise ValueError(2)"), True),
        (raised("undefined"), raised("1 / 0"), True),
        (raised("undefined"), raised("undefined", is_early=False), True),
        (raised("undefined", is_early=False), raised("undefined"), True),
        (raised("undefined"), raised("undefined", kind=FailureKind.OUT_OF_MEMORY), True),
        (raised("raise ConnectionError"), raised("raise ConnectionError"), True),
        (raised("from json import loads; loads('{')"), raised("from json import loads; loads('{')"), True),
        (raised("raise ValueError from ConnectionError()"), raised("raise ValueError from ConnectionError()"), True),
    ],
)
def test_mistake_that_a_retry_repeats_before_any_progress_is_not_retried_again(
    first: Failure, second: Failure, is_retried: bool
) -> None:
    decided = decisions(FailureConfig(max_failures=9), [first, second])
    assert [decision is not False for decision in decided] == [True, is_retried]
    assert all(decided is not False for decided in decisions(FailureConfig(max_failures=-1), [first, second]))


def test_error_of_the_run_says_why_a_repeated_mistake_is_not_retried(tmp_path: Path) -> None:
    def train() -> None:
        with (tmp_path / "attempts").open("a") as file:
            file.write("x")
        raise ValueError("no such column")

    with pytest.raises(TrainingFailedError, match="not retried again: the previous attempt ended with the same error"):
        fit(train, tmp_path, max_failures=5)
    assert (tmp_path / "attempts").read_text() == "xx"


def test_error_after_a_report_is_retried_as_often_as_allowed(tmp_path: Path) -> None:
    def train() -> None:
        drivetrain.report({"step": 0})
        raise ValueError("no such column")

    with pytest.raises(TrainingFailedError, match="attempt 2 failed"):
        fit(train, tmp_path, max_failures=3)


def fit(train: Callable[[], Any], tmp_path: Path, policy: Any = None, workers: int = 0, **options: Any) -> Result:
    config = FailureConfig(policy=policy, **options)
    return DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, failure_config=config),
    ).fit()


def test_function_that_terminates_its_own_process_does_not_restart_forever(tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"

    def train() -> None:
        with attempts.open("a") as file:
            file.write(".")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(30)

    with pytest.raises(TrainingFailedError) as failed:
        fit(train, tmp_path, workers=1, max_preemptions_without_progress=2, retry_backoff_s=0.01)
    assert failed.value.kind is FailureKind.PREEMPTION
    assert attempts.read_text() == "..."


def fail() -> None:
    raise ValueError("mine")


def wait_a_moment(latest: Failure, history: Any) -> float | bool:
    return 0.01 if len(history) < 2 else False


class Once:
    def decide(self, latest: Failure, history: Any) -> bool:
        return not history


@pytest.mark.parametrize(("policy", "attempts"), [(wait_a_moment, 3), (Once, 2), (Once(), 2)])
def test_policy_is_a_function_a_class_or_an_object(tmp_path: Path, policy: Any, attempts: int) -> None:
    with pytest.raises(TrainingFailedError) as failed:
        fit(fail, tmp_path, policy)
    assert str(failed.value).count("attempt ") == attempts - 1


def test_policy_is_selected_by_its_name(tmp_path: Path, install: Install) -> None:
    source = "def decide(failure, history):\n    return not history\n"
    install("twice-plugin", "twice_plugin", source, {"drivetrain.policies": {"twice": "twice_plugin:decide"}})
    with pytest.raises(TrainingFailedError, match="attempt 0 failed"):
        fit(fail, tmp_path, "twice")


def test_options_are_passed_to_a_policy_that_is_selected_by_name(tmp_path: Path, install: Install) -> None:
    source = (
        "class Limit:\n"
        "    def __init__(self, retries): self.retries = retries\n"
        "    def decide(self, failure, history): return len(history) < self.retries\n"
        "def never(failure, history): return False\n"
    )
    names = {"limit": "limit_plugin:Limit", "never": "limit_plugin:never"}
    install("limit-plugin", "limit_plugin", source, {"drivetrain.policies": names})
    with pytest.raises(TrainingFailedError, match="attempt 1 failed"):
        fit(fail, tmp_path, ("limit", {"retries": 2}))
    with pytest.raises(PluginBrokenError, match=r"without arguments raised TypeError.*as in \('limit', \{\.\.\.\}\)"):
        fit(fail, tmp_path, "limit")
    with pytest.raises(PluginBrokenError, match="policy 'never': expected no options, because it is a function"):
        fit(fail, tmp_path, ("never", {"retries": 2}))


def test_policy_that_is_none_is_refused_before_the_run_directory_exists(tmp_path: Path, install: Install) -> None:
    install("odd-plugin", "odd_plugin", "VALUE = 3\n", {"drivetrain.policies": {"odd": "odd_plugin:VALUE"}})
    with pytest.raises(PluginBrokenError, match=r"policy 'odd' of odd-plugin.* an object of int without decide"):
        fit(fail, tmp_path, "odd")
    with pytest.raises(PluginNotFoundError, match="no policy 'none' is installed"):
        fit(fail, tmp_path, "none")
    assert not (tmp_path / "run").exists()


class Demanding:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def decide(self, latest: Failure, history: Any) -> bool:
        return len(history) < self.limit


def test_class_that_needs_arguments_is_refused() -> None:
    with pytest.raises(PluginBrokenError, match=r"without arguments raised TypeError.*Demanding\(\.\.\.\)"):
        make_policy(FailureConfig(policy=Demanding))


@pytest.mark.parametrize("policy", [3, int, object()])
def test_object_that_cannot_decide_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"policy.*decide\(failure, history\)"):
        FailureConfig(policy=policy)


@pytest.mark.parametrize("decision", ["often", None, -1, float("nan"), float("inf")])
def test_decision_that_is_neither_a_bool_nor_a_delay_ends_the_run(tmp_path: Path, decision: Any) -> None:
    with pytest.raises(TrainingFailedError, match=f"expected True, False or seconds >= 0, got {decision!r}") as failed:
        fit(fail, tmp_path, lambda latest, history: decision)
    assert "The run is not retried" in str(failed.value)
    assert isinstance(failed.value.__cause__, ValueError)


@pytest.mark.parametrize("policy", ["vague", ("vague", {"value": "often"})])
def test_wrong_decision_of_a_policy_that_is_selected_by_name_names_it(
    tmp_path: Path, install: Install, policy: Any
) -> None:
    source = (
        "class Vague:\n"
        "    def __init__(self, value=None): self.value = value\n"
        "    def decide(self, failure, history): return self.value\n"
    )
    install("vague-plugin", "vague_plugin", source, {"drivetrain.policies": {"vague": "vague_plugin:Vague"}})
    with pytest.raises(TrainingFailedError, match=r"\[DT-605\] policy 'vague': expected True.* The run is not retried"):
        fit(fail, tmp_path, policy)


def test_policy_that_raises_does_not_hide_the_failure(tmp_path: Path) -> None:
    def decide(latest: Failure, history: Any) -> bool:
        raise LookupError("no idea")

    with pytest.raises(TrainingFailedError, match=r"(?s)mine.*policy=.*raised LookupError: no idea") as failed:
        fit(fail, tmp_path, decide)
    assert isinstance(failed.value.__cause__, ValueError)
    stored = Result.from_path(tmp_path / "run").error
    assert stored is not None
    assert stored.args == failed.value.args


def test_cancelling_ends_the_wait_before_the_next_attempt(tmp_path: Path) -> None:
    waiting = threading.Event()

    class Waits(Callback):
        def on_failure(self, run: Any, latest: Failure, retrying: bool) -> None:
            assert retrying
            waiting.set()

    handle = DataParallelTrainer(
        fail,
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(
            storage_path=tmp_path,
            verbose=0,
            callbacks=[Waits()],
            failure_config=FailureConfig(policy=lambda latest, history: 1_000_000_000),
        ),
    ).start()
    assert waiting.wait(30)
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result()


OPTIONS = """
from drivetrain import Callback

class Webhook(Callback):
    def __init__(self, url, token=""):
        self.url = url
"""


def test_options_are_passed_to_a_callback_that_is_selected_by_name(install: Install) -> None:
    install("hook-plugin", "hook_plugin", OPTIONS, {"drivetrain.callbacks": {"hook": "hook_plugin:Webhook"}})
    *_, callback = make_callbacks(RunConfig(callbacks=[("hook", {"url": "here"})]))
    assert vars(callback) == {"url": "here"}
    with pytest.raises(PluginBrokenError, match=r"with the options uri raised TypeError.*\('hook', \{\.\.\.\}\)"):
        make_callbacks(RunConfig(callbacks=[("hook", {"uri": "here"})]))


def test_class_of_a_callback_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"got the class Collector\. Write Collector\(\)"):
        RunConfig(callbacks=[Collector])  # type: ignore[list-item]


def test_options_that_are_not_a_mapping_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a pair of a name and a mapping with options"):
        RunConfig(callbacks=[("hook", "here")])  # type: ignore[list-item]


def test_method_that_looks_like_a_hook_is_reported() -> None:
    class Misspelled(Callback):
        def on_reports(self, run: Any, report: Any) -> None: ...

    with pytest.warns(UserWarning, match=r"Misspelled.on_reports\(\) is never called.*Did you mean 'on_report'"):
        make_callbacks(RunConfig(callbacks=[Misspelled()]))

    class OfAnotherTool(Callback):
        def on_epoch_end(self, run: Any) -> None: ...

    with pytest.warns(
        UserWarning, match=r"on_epoch_end\(\) is never called.* The hooks are: on_checkpoint, on_failure"
    ):
        make_callbacks(RunConfig(callbacks=[OfAnotherTool()]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_callbacks(RunConfig(callbacks=[Collector()]))
