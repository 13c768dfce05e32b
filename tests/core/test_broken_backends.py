"""Mistakes in a backend end the run with an error that names the backend, the method and the expectation."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    BackendError,
    ConfigurationError,
    DataParallelTrainer,
    FailureKind,
    Result,
    RunCancelledError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain.plugin import Backend, BackendConfig


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


def make_trainer(
    backend: Any, tmp_path: Path, function: Any = lambda: "trained", **run_config: Any
) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,
        backend_config=backend,
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, **run_config),
    )


def fit(backend: Any, tmp_path: Path, function: Any = lambda: "trained", **run_config: Any) -> Result:
    return make_trainer(backend, tmp_path, function, **run_config).fit()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (IndexError("list index out of range"), "IndexError: list index out of range"),
        (OSError("no free port"), "OSError: no free port"),
        ([{}], "expected 2 mappings, one per rank, got 1"),
        (None, "expected a list with one mapping per rank, got None"),
        ({0: {}, 1: {}}, "expected a list with one mapping per rank, got {0"),
        (["host", "port"], "expected a list with one mapping per rank, got ['host'"),
        ({"a": 1}, "expected a list with one mapping per rank, got {'a': 1}"),
    ],
)
def test_error_in_rendezvous_names_the_backend_and_the_method(tmp_path: Path, answer: Any, message: str) -> None:
    with pytest.raises(TrainingFailedError) as failed:
        fit(Broken(answer), tmp_path)
    assert f"[DT-607] backend 'broken' failed in rendezvous: {message}" in str(failed.value)
    assert isinstance(failed.value.__cause__, type(answer) if isinstance(answer, Exception) else BackendError)


@pytest.mark.parametrize("mapping", [{"port": 1}, {1: "port"}])
def test_rendezvous_must_return_mappings_of_strings(tmp_path: Path, mapping: Any) -> None:
    message = f"failed in rendezvous (rank 1): expected a mapping from names to strings, got {mapping}"
    with pytest.raises(TrainingFailedError, match=re.escape(message)):
        fit(Broken([{}, mapping]), tmp_path)


@pytest.mark.parametrize(
    ("session", "problem"),
    [
        (lambda self, context, rendezvous: (yield), "got a generator. Decorate it with @contextlib.contextmanager"),
        (lambda self, context, rendezvous: None, "got None. Add a yield, and decorate it"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_session_must_return_a_context_manager(tmp_path: Path, session: Any, problem: str, num_workers: int) -> None:
    trainer = DataParallelTrainer(
        lambda: "trained",
        backend_config=attribute("session", session)([{}] * max(1, num_workers)),
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    )
    message = rf"\[DT-607\] backend 'broken' failed in session \(rank \d\): expected a context manager, {problem}"
    with pytest.raises(TrainingFailedError, match=message) as failed:
        trainer.fit()
    assert isinstance(failed.value.__cause__, BackendError)


class Misspells(Broken):
    def rank_enviroment(self, worker: Any, workers: Any) -> Mapping[str, str]:
        return {}


class HasFurtherMethods(Broken):
    def rank_environment(self, worker: Any, workers: Any) -> Mapping[str, str]:
        return self.rank_environments()[0]

    def rank_environments(self) -> list[dict[str, str]]:
        return [{}]

    def find_port(self) -> int:
        return 1


def test_misspelled_optional_method_causes_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'broken': Misspells\.rank_enviroment\(\) is never.* rank_environment\(\)\?"):
        make_trainer(Misspells(), tmp_path)


def test_backend_may_have_further_methods(tmp_path: Path) -> None:
    make_trainer(HasFurtherMethods(), tmp_path)


class HoldsALock(FailsToClose):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class StartsATracker(FailsToClose):
    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        self.tracker = threading.Lock()
        return super().rendezvous(group)


PICKLING = (
    r"\[DT-607\] backend 'broken': expected a backend that can be pickled, got \w+ \(TypeError: .*lock.*\)\. "
    r"Create such objects in session\(\)"
)


def test_backend_that_cannot_be_pickled_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=PICKLING):
        fit(HoldsALock(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_backend_that_cannot_be_pickled_after_rendezvous_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=PICKLING) as failed:
        fit(StartsATracker(), tmp_path)
    assert isinstance(failed.value.__cause__, TypeError)


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("no device")


class FailsOnOneRank(FailsToClose):
    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        group.run(fail_on_rank_1)
        return []


def test_error_that_rendezvous_gets_from_a_rank_names_the_rank(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=r"failed in rendezvous \(rank 1\): ZeroDivisionError"):
        fit(FailsOnOneRank(), tmp_path)


class NeverReturns(Broken):
    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        while True:
            wait_without_end()


def wait_without_end() -> None:
    threading.Event().wait(600)


def test_rendezvous_that_never_returns_ends_in_time_and_shows_where_it_is(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(TrainingFailedError, match="failed in rendezvous: expected it to return within") as failed:
        fit(NeverReturns(), tmp_path, start_timeout_s=10.0)
    assert time.monotonic() - started < 60
    assert "wait_without_end" in str(failed.value.__cause__)
    assert failed.value.kind is FailureKind.HANG


class Enters(NeverReturns):
    entered = threading.Event()

    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        self.entered.set()
        return super().rendezvous(group)


def test_cancel_interrupts_a_rendezvous_that_never_returns(tmp_path: Path) -> None:
    run = make_trainer(Enters(), tmp_path).start()
    assert Enters.entered.wait(60)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(30)


class EntersWorkers(Enters):
    entered = threading.Event()

    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        self.entered.set()
        group.run(wait_without_end)
        raise AssertionError("the function has returned")


def test_cancel_interrupts_a_rendezvous_that_waits_for_its_workers(tmp_path: Path) -> None:
    run = make_trainer(EntersWorkers(), tmp_path).start()
    assert EntersWorkers.entered.wait(60)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(60)


def attribute(name: str, value: Any) -> type[Backend]:
    return type("Odd", (Broken,), {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("environment", {"THREADS": 4}, "environment: expected a mapping from names to strings, got {'THREADS': 4}"),
        ("environment", None, "environment: expected a mapping from names to strings, got None"),
        ("rank_environment", lambda self, worker, workers: [], "rank_environment: expected a mapping"),
        ("rank_environment", lambda self, worker, workers: worker.tpus, "rank_environment: AttributeError"),
        ("validate", lambda self, scaling: scaling.num_tpus, "validate: AttributeError"),
        ("callbacks", lambda self: None, "callbacks: expected a list of drivetrain.Callback objects, got None"),
        (
            "callbacks",
            lambda self: [print],
            "callbacks: expected a list of drivetrain.Callback objects, got [<",
        ),
    ],
)
def test_error_in_an_optional_member_names_it(tmp_path: Path, name: str, value: Any, message: str) -> None:
    with pytest.raises((BackendError, TrainingFailedError)) as failed:
        fit(attribute(name, value)([{}, {}]), tmp_path)
    assert f"[DT-607] backend 'broken' failed in {message}" in str(failed.value)


def test_refusal_of_a_backend_is_raised_before_anything_is_written(tmp_path: Path) -> None:
    class Refuses(Broken):
        def validate(self, scaling: ScalingConfig) -> None:
            raise ConfigurationError(f"expected 3 workers, got {scaling.num_workers}")

    with pytest.raises(ConfigurationError, match="expected 3 workers, got 2"):
        fit(Refuses(), tmp_path)
    assert not list(tmp_path.iterdir())


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
        (EmptyConfig(), r"EmptyConfig.create\(\): expected a drivetrain.plugin.Backend, got None"),
    ],
)
def test_configuration_that_creates_no_backend_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(config, tmp_path)
    assert not list(tmp_path.iterdir())
