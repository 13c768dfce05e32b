import array
import enum
import multiprocessing
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    SessionError,
    TrainingFailedError,
)
from drivetrain._worker.metrics import plain_metrics


class Tensor:
    """An object with the attributes of a framework's tensor."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def item(self) -> float:
        return 0.5


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"weights": Tensor(2, 3)}, "of shape (2, 3) as metric 'weights'"),
        ({"weights": Tensor(0)}, "of shape (0,) as metric 'weights'"),
        ({"losses": (x for x in range(3))}, "a generator as metric 'losses'"),
        ({"peer": socket.socket}, "as metric 'peer'"),
        ({"raw": b"bytes"}, "a bytes as metric 'raw'"),
        ({"when": {1, 2}}, "a set as metric 'when'"),
        ({"z": 1j}, "a complex as metric 'z'"),
        ({"a": {"b": [0, {"c": object()}]}}, "a object as metric 'a.b[1].c'"),
        ({"a": [1, Tensor(4)]}, "of shape (4,) as metric 'a[1]'"),
        ({"a": {1: 2}}, "strings as names in metric 'a', got 1"),
        ({3: 1}, "strings as names of metrics, got 3"),
        ([("a", 1)], "a mapping from metric to value, got a list"),
        (None, "a mapping from metric to value, got a NoneType"),
    ],
)
def test_value_that_is_not_plain_is_refused_with_its_key(metrics: Any, words: str) -> None:
    with pytest.raises(SessionError) as refused:
        plain_metrics(metrics)

    assert words in str(refused.value)


def test_open_socket_is_refused_with_its_key() -> None:
    with socket.socket() as open_socket, pytest.raises(SessionError, match=r"a socket\.socket as metric 'peer'"):
        plain_metrics({"peer": open_socket})


def test_framework_numbers_are_converted_to_plain_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    metrics = {
        "scalar": numpy.float32(0.5),
        "double": numpy.float64(0.25),
        "integer": numpy.int64(3),
        "flag": numpy.bool_(True),
        "one": numpy.array([[7]]),
        "tensor": Tensor(),
        "enum": Colour.RED,
        "nested": {"values": (1, numpy.int8(2))},
    }

    values = plain_metrics(metrics)

    assert values == {
        **{"scalar": 0.5, "double": 0.25, "integer": 3, "flag": True, "one": 7, "tensor": 0.5, "enum": 1},
        "nested": {"values": [1, 2]},
    }
    assert [type(value) for value in values.values()] == [float, float, int, bool, int, float, int, dict]


def test_array_without_item_is_refused_with_its_key() -> None:
    with pytest.raises(SessionError, match="as metric 'buffer'"):
        plain_metrics({"buffer": array.array("d", [1.0])})


@pytest.mark.parametrize(
    "call",
    [lambda: drivetrain.report({}), drivetrain.get_checkpoint, drivetrain.get_context],
    ids=["report", "get_checkpoint", "get_context"],
)
def test_call_outside_a_train_function_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(SessionError, match=r"inside a train function, but this process runs none.*trainer\.fit"):
        call()


def run_here(function: Callable[[], Any], tmp_path: Path) -> Any:
    run_config = RunConfig(name="run", storage_path=tmp_path, verbose=0)
    return DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0), run_config=run_config).fit()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"metrics": {"a": 1}, "reduce": {"a": "median"}}, "one of mean, sum, min, max for 'a', got 'median'"),
        ({"metrics": {"a": 1}, "reduce": {"b": "mean"}}, "a number reported as 'b', got 'no such metric'"),
        ({"metrics": {"a": "text"}, "reduce": {"a": "mean"}}, "a number reported as 'a', got 'text'"),
        ({"metrics": {"a": True}, "reduce": {"a": "mean"}}, "a number reported as 'a', got True"),
        ({"metrics": {}, "checkpoint": "directory"}, "got 'directory'. Use Checkpoint.from_directory(path)"),
        ({"loss": 1, "reduce": 0.5}, "expected a mapping from metrics to reductions, got 0.5. If it is a metric, use"),
        ({"wait": "long"}, "expected True, False or a positive number of seconds, got 'long'. If it is a metric, use"),
        ({"delete_local_checkpoint_after_upload": 1}, "expected True or False, got 1"),
        ({"checkpoint_upload_fn": 0.1}, "expected a function, got 0.1"),
        (
            {"loss": 1, "checkpont": 2},
            "expected a metric, or an option such as checkpoint, got 2. If it is a metric, use",
        ),
        ({"loss": 1, "checkpoint_upload_mod": "async"}, "an option such as checkpoint_upload_mode, got 'async'"),
        ({"loss": 1, "model": Checkpoint("/directory")}, "an option such as checkpoint, got Checkpoint"),
    ],
)
def test_report_refuses_invalid_arguments_and_the_run_continues(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    def train() -> str:
        with pytest.raises(SessionError) as refused:
            drivetrain.report(**arguments)
        drivetrain.report({"step": 1})
        return str(refused.value)

    result = run_here(train, tmp_path)

    assert words in result.return_value
    assert result.metrics["_training_iteration"] == 1


def test_report_accepts_metrics_with_names_like_those_of_options_in_a_mapping(tmp_path: Path) -> None:
    def train() -> None:
        drivetrain.report({"reduce": 0.5, "checkpont": 2, "wait": 3})
        drivetrain.report(checked=1, redundancy=2, weight=3)

    assert run_here(train, tmp_path).error is None


def test_report_of_a_shared_checkpoint_without_its_with_block_is_refused(tmp_path: Path) -> None:
    def train() -> str:
        with pytest.raises(SessionError) as refused:
            drivetrain.report({}, checkpoint=drivetrain.shared_checkpoint())  # type: ignore[arg-type]
        return str(refused.value)

    assert "write `with shared_checkpoint() as checkpoint:`" in run_here(train, tmp_path).return_value


def test_report_from_a_child_process_is_refused(tmp_path: Path) -> None:
    def train() -> str:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe()

        def child() -> None:
            try:
                drivetrain.report({"step": 0})
            except SessionError as error:
                sender.send(str(error))

        process = context.Process(target=child)
        process.start()
        process.join(30)
        return receiver.recv()

    assert "got one in a child process" in run_here(train, tmp_path).return_value


def test_fit_inside_a_train_function_of_this_process_is_refused(tmp_path: Path) -> None:
    def train() -> None:
        run_here(lambda: None, tmp_path / "inner")

    with pytest.raises(drivetrain.TrainingFailedError, match="expected no running train function in this process"):
        run_here(train, tmp_path)


def test_metrics_are_copied_when_they_are_reported(tmp_path: Path) -> None:
    def train() -> None:
        metrics = {"values": [1]}
        drivetrain.report(metrics)
        metrics["values"].append(2)
        assert set(metrics) == {"values"}

    assert run_here(train, tmp_path).metrics["values"] == [1]


def test_checkpoint_of_a_directory_does_not_read_the_directory(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_directory(tmp_path / "later")

    with (
        pytest.raises(drivetrain.CheckpointError, match="expected the checkpoint's directory, which does not exist"),
        checkpoint.as_directory(),
    ):
        pass
    assert checkpoint == Checkpoint(str(tmp_path / "later"))


def test_report_from_a_signal_handler_inside_a_report_is_refused(tmp_path: Path) -> None:
    """It would wait for itself."""

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("the handler raised no exception")

    def train() -> str:
        before = signal.signal(signal.SIGUSR1, lambda *_: drivetrain.report({"saved": True}))
        try:
            with pytest.raises(SessionError) as refused:
                drivetrain.report({}, Checkpoint.from_directory(tmp_path), checkpoint_upload_fn=upload)
        finally:
            signal.signal(signal.SIGUSR1, before)
        drivetrain.report({"step": 1})
        return str(refused.value)

    assert "[DT-811] report(): expected a call outside of report()" in run_here(train, tmp_path / "runs").return_value


def test_background_upload_that_exits_fails_the_run(tmp_path: Path) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        sys.exit("no such bucket")

    def train() -> None:
        drivetrain.report(
            {}, Checkpoint.from_directory(tmp_path), checkpoint_upload_mode="async", checkpoint_upload_fn=upload
        )

    with pytest.raises(TrainingFailedError, match=r"\[DT-407\] a checkpoint was not stored .*: no such bucket"):
        run_here(train, tmp_path / "runs")
