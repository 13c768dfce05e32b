"""Mistakes in a backend end the run with an error that names the backend, the method and the expectation."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    Backend,
    BackendConfig,
    BackendError,
    ConfigurationError,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)


class Broken(Backend):
    name = "broken"

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: Sequence[Mapping[str, str]] = self.answer
        return answer

    @contextlib.contextmanager
    def session(self, context: Any, rendezvous: Mapping[str, str]) -> Iterator[None]:
        yield


class FailsToClose(Broken):
    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        return [{} for _ in group.workers]

    def close(self) -> None:
        raise LookupError("already closed")


def fit(backend: Any, tmp_path: Path, function: Any = lambda: "trained") -> Result:
    return DataParallelTrainer(
        function,
        backend_config=backend,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
    ).fit()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (IndexError("list index out of range"), "IndexError: list index out of range"),
        (OSError("no free port"), "OSError: no free port"),
        ([{}], "expected 2 mappings, one per rank, got 1"),
        (None, "expected a list with one mapping per rank, got None"),
        ({0: {}, 1: {}}, "expected a list with one mapping per rank, got {0"),
        (["host", "port"], "expected a list with one mapping per rank, got ['host'"),
    ],
)
def test_error_in_rendezvous_names_the_backend_and_the_method(tmp_path: Path, answer: Any, message: str) -> None:
    with pytest.raises(TrainingFailedError) as failed:
        fit(Broken(answer), tmp_path)
    assert f"[DT-607] backend 'broken' failed in rendezvous: {message}" in str(failed.value)
    assert isinstance(failed.value.__cause__, type(answer) if isinstance(answer, Exception) else BackendError)


def test_error_in_close_after_success_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(FailsToClose(), tmp_path).return_value == "trained"
    assert "run: backend 'broken' failed in close: LookupError: already closed" in capsys.readouterr().err


def test_error_in_close_does_not_hide_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(TrainingFailedError, match="mine"):
        fit(FailsToClose(), tmp_path, fail)
    assert "failed in close" in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class MisspelledConfig(BackendConfig):
    def creat(self) -> Backend:
        return Broken()


@dataclass(frozen=True, kw_only=True)
class EmptyConfig(BackendConfig):
    def create(self) -> Backend:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MisspelledConfig(), r"MisspelledConfig: expected a method create\(\).*Did you mean 'creat'"),
        (EmptyConfig(), r"EmptyConfig.create\(\): expected a drivetrain.Backend, got None"),
    ],
)
def test_configuration_that_creates_no_backend_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(config, tmp_path)
    assert not list(tmp_path.iterdir())
