"""The conformance kit for backends, as tests that a plugin inherits.

A plugin author writes a class with a few attributes, and pytest collects the tests::

    from drivetrain_testing import BackendConformance

    class TestMyBackend(BackendConformance):
        config = MyConfig()
        framework = "my_framework"

If the framework can sum a number over all ranks, define that too::

        @staticmethod
        def all_sum(value: float) -> float:
            return my_framework.all_reduce(value)

A test that cannot pass for a backend must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import (
    Callback,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain.plugin import Backend, BackendConfig, WorkerInfo
from drivetrain.plugin.backends import AttemptInfo
from drivetrain.plugin.checks import find_misspelled_method
from drivetrain.plugin.trainers import dumps
from drivetrain_testing import _jobs
from drivetrain_testing._checks import forget_test_name
from drivetrain_testing._leftovers import ProcessState
from drivetrain_testing._wrapping import FailsInSetup, Observed, RunsInWorker, UnreachableGroup, Wrapped

__all__ = ["BackendConformance", "check_overrides"]

_START_TIMEOUT_S = 120.0
_RESOURCES = {"CPU": 1}  # the number of threads is then the same in all runs, so they can share a fork server
_CREATE = """
import pickle, sys
framework = sys.argv[1]
with open(sys.argv[2], "rb") as file:
    config = pickle.load(file)
assert framework not in sys.modules, f"unpickling the config imports {framework}"
backend = config.create()
assert framework not in sys.modules, f"{type(config).__name__}.create() imports {framework}"
pickle.dumps(backend)
assert framework not in sys.modules, f"pickling the backend imports {framework}"
"""


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """An undisturbed run."""

    world_size: int
    result: Result
    observer: _jobs.Observer
    backend: Observed

    def facts(self) -> list[dict[str, Any]]:
        """Return the facts that each rank has reported last, by rank."""
        return [self.observer.reports[rank][-1]["facts"] for rank in range(self.world_size)]


class BackendConformance:
    """Tests of a backend on real worker processes. Derive a class from it and set :attr:`config`.

    Attributes:
        config: the configuration whose backend is tested.
        all_sum: sums a number over all ranks, called on every rank. None if the framework has no such operation; the
            test that needs it is then skipped.
        framework: the import name of the framework; None if the backend has none. The test that the configuration does
            not need the framework is then skipped.
        world_sizes: the numbers of workers to test with. It must contain 2.
        runtimes: the runtimes to test on.
    """

    config: ClassVar[BackendConfig]
    all_sum: ClassVar[Callable[..., float] | None] = None
    framework: ClassVar[str | None] = None
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    runtimes: ClassVar[Sequence[str]] = ("local",)
    _trained: ClassVar[dict[tuple[str, int], _Trained]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(getattr(cls, "config", None), BackendConfig):
            raise TypeError(f"{cls.__name__}: expected an attribute `config` with a BackendConfig")
        check_overrides(cls, BackendConformance)
        cls._trained = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on every runtime in :attr:`runtimes`, and some with each number of workers."""
        if "fit" in metafunc.fixturenames:
            metafunc.parametrize("fit", self.runtimes, indirect=True)
        if "trained" in metafunc.fixturenames:
            cases = [(runtime, size) for runtime in self.runtimes for size in self.world_sizes]
            metafunc.parametrize("trained", cases, indirect=True, ids=lambda case: f"{case[0]}-{case[1]}")

    @pytest.fixture
    def fit(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Result]]:
        """Yield a function that runs a train function on two workers. Check afterwards that all workers have exited."""
        observer = _jobs.Observer()

        def run(function: Callable[[dict[str, Any]], Any], **options: Any) -> Result:
            options["callbacks"] = [observer, *options.get("callbacks", ())]
            return self._trainer(function, request.param, tmp_path, **options).fit()

        run.observer = observer  # type: ignore[attr-defined]
        run.runtime = request.param  # type: ignore[attr-defined]
        yield run
        assert not observer.find_running(), "expected all worker processes to exit, but some are still running"

    @pytest.fixture
    def trained(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Trained:
        """An undisturbed run. All tests with the same number of workers share it."""
        runtime, size = request.param
        if request.param not in self._trained:
            directory = tmp_path_factory.mktemp("trained")
            observer, backend = _jobs.Observer(), Observed(self.config.create(), directory)
            trainer = self._trainer(
                _jobs.train, runtime, directory, backend=backend, num_workers=size, callbacks=[observer]
            )
            self._trained[request.param] = _Trained(
                world_size=size, result=trainer.fit(), observer=observer, backend=backend
            )
        return self._trained[request.param]

    def _trainer(
        self,
        function: Callable[[dict[str, Any]], Any],
        runtime: str,
        directory: Path,
        *,
        backend: Backend | None = None,
        num_workers: int = 2,
        callbacks: Sequence[Callback] = (),
        max_failures: int = 0,
        name: str = "run",
    ) -> DataParallelTrainer:
        forget_test_name()
        return DataParallelTrainer(
            function,
            train_loop_config={"all_sum": type(self).all_sum},
            backend_config=backend or Wrapped(self.config.create()),
            scaling_config=ScalingConfig(num_workers=num_workers, runtime=runtime, resources_per_worker=_RESOURCES),
            run_config=RunConfig(
                name=name,
                storage_path=directory,
                verbose=0,
                callbacks=list(callbacks),
                failure_config=FailureConfig(max_failures=max_failures),
                start_timeout_s=_START_TIMEOUT_S,
            ),
        )

    # The configuration and the methods that need no workers

    def test_config_creates_backends(self) -> None:
        first, second = self.config.create(), self.config.create()
        for backend in (first, second):
            assert isinstance(backend, Backend), f"create(): expected a Backend, got {backend!r}"
        assert first.name != Backend.name, f"{type(first).__name__}.name: expected the backend's name, got the default"

    def test_names_of_optional_methods_are_spelled_correctly(self) -> None:
        misspelled = find_misspelled_method(self.config.create(), Backend)
        assert misspelled is None, misspelled

    def test_config_and_backend_can_be_pickled(self) -> None:
        for name, value in (("config", self.config), ("backend", self.config.create())):
            try:
                copy = pickle.loads(dumps(value))
            except Exception as error:
                pytest.fail(f"{name}: expected an object that can be pickled, got {type(error).__name__}: {error}")
            assert type(copy) is type(value)

    def test_config_does_not_import_the_framework(self, tmp_path: Path) -> None:
        if self.framework is None:
            pytest.skip(f"{type(self).__name__} declares no framework")
        (tmp_path / "config.pkl").write_bytes(pickle.dumps(self.config))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _CREATE, self.framework, str(tmp_path / "config.pkl")]
        run = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        assert run.returncode == 0, (
            f"expected a config that can be used without importing {self.framework}, got:\n{run.stderr}"
        )

    def test_optional_methods_return_values_of_the_right_types(self) -> None:
        backend = self.config.create()
        for size in self.world_sizes:
            try:
                validated: object = backend.validate(ScalingConfig(num_workers=size))  # type: ignore[func-returns-value]
            except ConfigurationError as error:
                pytest.fail(f"validate(): expected {size} workers to be accepted (see world_sizes), got: {error}")
            assert validated is None, f"validate(): expected None or a ConfigurationError, got {validated!r}"
        _check_strings("environment", backend.environment)
        workers = _workers(2)
        for worker in workers:
            _check_strings("rank_environment()", backend.rank_environment(worker, workers))
        callbacks: object = backend.callbacks()
        assert isinstance(callbacks, Sequence), f"callbacks(): expected a list of callbacks, got {callbacks!r}"
        for callback in callbacks:
            assert isinstance(callback, Callback), f"callbacks(): expected drivetrain.Callback, got {callback!r}"

    def test_classify_returns_none_for_exceptions_of_others(self) -> None:
        backend = self.config.create()
        for error in (_UnknownError(), ValueError("no such value"), KeyboardInterrupt()):
            try:
                kind: object = backend.classify(error)
            except Exception as raised:
                pytest.fail(f"classify({error!r}): expected None, but it raised {type(raised).__name__}: {raised}")
            assert kind is None, f"classify({error!r}): expected None for an unknown exception, got {kind!r}"

    def test_close_after_a_failed_rendezvous_leaves_nothing(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        before = ProcessState.now()
        backend = self.config.create()
        attempt = AttemptInfo(number=0, run_name="run", run_id="0", start_timeout_s=_START_TIMEOUT_S)
        try:
            backend.rendezvous(UnreachableGroup(_workers(2), attempt))
        except Exception as error:  # the backend may need the workers
            del error
        for _ in range(2):
            try:
                backend.close()
            except Exception as error:
                pytest.fail(f"close(): expected nothing to happen in another call, got {type(error).__name__}: {error}")
        changes = before.changes(in_run=False)
        assert not changes, f"after a failed rendezvous(), close() has left {_listed(changes)}"

    # An undisturbed run

    def test_train_function_runs_on_every_rank_on_the_main_thread(self, trained: _Trained) -> None:
        assert sorted(trained.observer.reports) == list(range(trained.world_size)), "expected reports of every rank"
        for rank, facts in enumerate(trained.facts()):
            assert facts["is_main_thread"], f"rank {rank}: expected the main thread of the process"

    def test_world_facts_agree_with_the_environment(self, trained: _Trained) -> None:
        for rank, facts in enumerate(trained.facts()):
            assert (facts["rank"], facts["world_size"]) == (rank, trained.world_size)
            expected = {"RANK": str(rank), "WORLD_SIZE": str(trained.world_size), "LOCAL_RANK": str(rank)}
            assert facts["variables"] == expected, f"rank {rank}: expected the variables {expected}"

    def test_ranks_exchange_values(self, trained: _Trained) -> None:
        if type(self).all_sum is None:
            pytest.skip(f"{type(self).__name__} declares no all_sum")
        size = trained.world_size
        states = [trained.observer.reports[rank][-1]["state"] for rank in range(size)]
        expected = _jobs.expected_state(0, _jobs.STEPS, size, sums=True)
        assert states == [expected] * size, f"expected all_sum() to return the sum over {size} ranks on every rank"

    def test_checkpoint_has_the_files_of_all_ranks(self, trained: _Trained) -> None:
        assert trained.result.checkpoint is not None, "expected a committed checkpoint, got none"
        with trained.result.checkpoint.as_directory() as directory:
            found = {name for name in os.listdir(directory) if name.startswith("rank_")}
        assert found == {f"rank_{rank}.json" for rank in range(trained.world_size)}

    def test_rendezvous_returns_mappings_of_strings(self, trained: _Trained) -> None:
        for rank, mapping in enumerate(trained.backend.mappings):
            _check_strings(f"rendezvous(), rank {rank}", mapping)

    def test_session_leaves_nothing_in_the_workers(self, trained: _Trained) -> None:
        left = trained.backend.left_in_workers()
        assert len(left) == trained.world_size, f"expected every rank to leave its session, got ranks {sorted(left)}"
        for rank, changes in left.items():
            assert not changes, f"session() has left on rank {rank}: {_listed(changes)}"

    def test_close_leaves_nothing_in_the_driver(self, trained: _Trained) -> None:
        left = trained.backend.left_in_driver
        assert not left, f"rendezvous() and close() have left in the driver: {_listed(left)}"

    # Several runs

    def test_next_run_on_the_same_workers_trains(self, fit: Callable[..., Result], tmp_path: Path) -> None:
        pytest.importorskip("drivetrain_interactive", reason='requires pip install "drivetrain[interactive]"')
        from drivetrain_interactive import Trainer

        runtime: str = fit.runtime  # type: ignore[attr-defined]
        forget_test_name()
        config = {"all_sum": type(self).all_sum}
        run_config = RunConfig(verbose=0, start_timeout_s=_START_TIMEOUT_S)
        backend = Wrapped(self.config.create())
        with Trainer(
            backend,
            2,
            resources_per_worker=_RESOURCES,
            logdir=tmp_path,
            runtime=runtime,
            max_retries=0,
            run_config=run_config,
        ) as trainer:
            for number in (1, 2):
                try:
                    (value, _) = trainer.run(_jobs.train, config)
                except TrainingFailedError as error:
                    pytest.fail(f"run {number} on the same workers failed: {error}")
                assert value == {"first": 0, "state": self._state(_jobs.STEPS)}

    def test_session_in_the_driver_process_leaves_nothing(self, fit: Callable[..., Result], tmp_path: Path) -> None:
        """Test runs without workers, one of which raises. The process continues, so the session must clean up."""
        (tmp_path / "runs").mkdir()
        probe = RunsInWorker(self.config, tmp_path / "runs")
        fit(_jobs.do_nothing, backend=probe, num_workers=1)
        assert not probe.problems, "\n".join(probe.problems)

    # Failures and preemptions

    def test_failure_during_setup_is_reported_and_stops_the_other_ranks(self, fit: Callable[..., Result]) -> None:
        with pytest.raises(TrainingFailedError, match="rank 1 failed while setting up") as caught:
            fit(_jobs.train, backend=FailsInSetup(self.config.create()))
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    def test_exception_in_the_train_function_surfaces(self, fit: Callable[..., Result]) -> None:
        try:
            fit(_jobs.raise_on_last_rank)
        except TrainingFailedError as error:
            failed = error
        else:
            pytest.fail("expected the exception of the train function, got a success: session() swallows exceptions")
        cause = failed.__cause__
        assert isinstance(cause, ZeroDivisionError), f"expected the exception of rank 1 as the cause, got {cause!r}"
        assert failed.rank == 1

    def test_killed_rank_is_the_root_cause_and_the_run_resumes(self, fit: Callable[..., Result]) -> None:
        result = fit(_jobs.resume_after_a_kill, callbacks=[_jobs.KillsRank()], max_failures=1)
        failures = fit.observer.failures  # type: ignore[attr-defined]
        assert [(failure.rank, failure.kind) for failure in failures] == [(1, FailureKind.INFRASTRUCTURE)], (
            f"expected the killed rank 1 as the root cause, got {[failure.summary for failure in failures]}"
        )
        assert result.return_value["first"] == _jobs.KILLED_AFTER, "expected the run to resume from its checkpoint"
        assert result.return_value["state"] == self._state(_jobs.STEPS), "expected the result of an undisturbed run"

    def test_preempted_ranks_save_after_the_same_step_and_the_run_resumes(self, fit: Callable[..., Result]) -> None:
        value = fit(_jobs.save_when_preempted).return_value
        (failure,) = fit.observer.failures  # type: ignore[attr-defined]
        assert failure.kind is FailureKind.PREEMPTION, f"expected a preemption, got: {failure.summary}"
        assert len(set(value["steps"])) == 1, f"expected all ranks to save after the same step, got {value['steps']}"
        assert value["state"] == self._state(value["first"] + 1), "expected the result of an undisturbed run"

    def test_two_runs_of_one_driver_train_at_the_same_time(self, fit: Callable[..., Result], tmp_path: Path) -> None:
        runtime: str = fit.runtime  # type: ignore[attr-defined]
        barrier = threading.Barrier(2, timeout=_START_TIMEOUT_S)
        trainers = [
            self._trainer(_jobs.train, runtime, tmp_path, name=name, callbacks=[_jobs.MeetsOther(barrier)])
            for name in ("one", "two")
        ]
        runs = [trainer.start(raise_on_failure=False) for trainer in trainers]
        results = [run.result(2 * _START_TIMEOUT_S) for run in runs]
        errors = [f"{result.error}" for result in results if result.error is not None]
        assert not errors, "expected two runs of one driver to train at the same time, got\n" + "\n".join(errors)
        values = [result.return_value for result in results]
        assert values == [{"first": 0, "state": self._state(_jobs.STEPS)}] * 2, "the runs exchanged values"

    def _state(self, steps: int) -> int:
        return _jobs.expected_state(0, steps, 2, sums=type(self).all_sum is not None)


class _UnknownError(Exception):
    """An exception that no framework knows, and whose text cannot be read."""

    def __str__(self) -> str:
        raise ValueError("this exception has no text")

    def __repr__(self) -> str:
        return "an unknown exception"


def check_overrides(derived: type[object], kit: type[object]) -> None:
    """Check that a class overrides tests of a conformance kit only with a reason.

    Raises:
        TypeError: the class overrides a test without ``xfail(reason=...)``.
    """
    for name, value in vars(derived).items():
        if name.startswith("test_") and hasattr(kit, name):
            marks = getattr(value, "pytestmark", [])
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                raise TypeError(
                    f"{derived.__name__}.{name}: expected xfail(reason=...) on an overridden test, got none"
                )


def _check_strings(where: str, found: object) -> None:
    assert isinstance(found, Mapping), f"{where}: expected a mapping of strings, got {found!r}"
    for name, value in found.items():
        assert isinstance(name, str), f"{where}: expected strings as names, got {name!r}"
        assert isinstance(value, str), f"{where}: expected strings as values, got {name}={value!r}"


def _workers(count: int) -> tuple[WorkerInfo, ...]:
    """Return the description of workers on this machine. There are no such processes."""
    return tuple(
        WorkerInfo(
            rank=rank,
            local_rank=rank,
            node_rank=0,
            node_id=socket.gethostname(),
            hostname=socket.gethostname(),
            ip="127.0.0.1",
            pid=os.getpid(),
        )
        for rank in range(count)
    )


def _listed(changes: Sequence[str]) -> str:
    return ", ".join(changes)
