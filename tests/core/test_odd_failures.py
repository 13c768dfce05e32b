"""Every exception of a train function reaches the user with its type, whatever the exception does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drivetrain
from drivetrain import DataParallelTrainer, FailureKind, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain._base.failure import capture_failure, format_exception, one_line, rebuild_exception, text_of
from tests.odd import (
    OwnBaseException,
    ReduceFails,
    TextExits,
    TextFails,
    fail_with_broken_streams,
    fail_with_closed_streams,
)


def exit_with_odd_status() -> None:
    # Created here, because tblib's reducers for exceptions, which TensorFlow installs, lose the status.
    raise SystemExit(TextFails())


class TextIsNoText(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # noqa: PLE0307


class AttributesFail(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no attributes")


def recurse() -> None:
    recurse()


def report_cycle() -> None:
    metrics: dict[str, Any] = {}
    metrics["inner"] = metrics
    drivetrain.report(metrics)


def report_cyclic_list() -> None:
    values: list[Any] = []
    values.append(values)
    drivetrain.report({"values": values})


def raising(error: BaseException) -> Callable[[], None]:
    def train() -> None:
        raise error

    return train


def fit(function: Callable[[], Any], tmp_path: Path) -> drivetrain.Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, start_timeout_s=120),
    ).fit()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (recurse, "RecursionError: maximum recursion depth"),
        (report_cycle, r"SessionError: \[DT-802\] .* nested at most 50 levels deep, got more in metric 'inner.inner"),
        (report_cyclic_list, r"SessionError: \[DT-802\] .* nested at most 50 levels deep"),
        (raising(asyncio.CancelledError("cancelled")), "CancelledError: cancelled"),
        (raising(OwnBaseException("own")), "OwnBaseException: own"),
        (raising(GeneratorExit()), "GeneratorExit"),
        (raising(TextFails()), r"TextFails: \(its __str__ method raised an exception\)"),
        (raising(TextExits()), r"TextExits: \(its __str__ method raised an exception\)"),
        (raising(TextIsNoText()), r"TextIsNoText: \(its __str__ method raised an exception\)"),
        (exit_with_odd_status, "SystemExit: "),
        (raising(ValueError("lone \udc80 surrogate")), r"ValueError: lone \\udc80 surrogate"),
        (fail_with_broken_streams, "ZeroDivisionError: the real error"),
        (fail_with_closed_streams, "ZeroDivisionError: the real error"),
    ],
    ids=lambda value: getattr(value, "__qualname__", value)[:40],
)
def test_exception_reaches_the_user_with_its_type(function: Callable[[], Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingFailedError, match=f"rank [01] failed while running the train function: {expected}"
    ) as e:
        fit(function, tmp_path)

    assert e.value.kind is FailureKind.USER_ERROR
    assert type(e.value.__cause__).__name__ in expected
    (run,) = tmp_path.iterdir()
    assert type(e.value.__cause__).__name__ in (run / "error.txt").read_text()


@pytest.mark.parametrize("kind", [ReduceFails, AttributesFail])
def test_exception_that_cannot_be_pickled_keeps_its_name(kind: type[Exception]) -> None:
    assert kind.__name__ in one_line(rebuild_exception(capture_failure(kind("message"))))


def test_a_long_traceback_keeps_its_first_and_last_frames() -> None:
    with pytest.raises(RecursionError) as caught:
        recurse()

    rebuilt = rebuild_exception(capture_failure(caught.value))

    functions = []
    entry = rebuilt.__traceback__
    while entry is not None:
        functions.append(entry.tb_frame.f_code.co_name)
        entry = entry.tb_next
    assert len(functions) == 100
    assert functions[0] == "test_a_long_traceback_keeps_its_first_and_last_frames"
    assert functions[-1] == "recurse"


def test_a_long_message_is_shortened() -> None:
    error = ValueError("x" * 10_000_000)

    assert len(text_of(error)) < 300_000
    assert len(format_exception(error)) < 300_000
    assert len(one_line(error)) < 3_000
    assert "characters omitted" in one_line(error)


def test_numpy_longdouble_is_a_metric(tmp_path: Path) -> None:
    result = fit(lambda: drivetrain.report({"value": np.longdouble(1.5)}), tmp_path)

    assert result.metrics["value"] == 1.5
