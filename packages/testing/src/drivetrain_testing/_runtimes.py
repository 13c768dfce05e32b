"""The conformance kit for runtimes, as tests that a plugin inherits.

A plugin author writes a class with two attributes, and pytest collects the tests::

    from drivetrain_testing import RuntimeCapability, RuntimeConformance

    class TestMyRuntime(RuntimeConformance):
        runtime = "my"  # the name of the entry point, or the class
        capabilities = {RuntimeCapability.PROCESSES, RuntimeCapability.EXIT_CODES}

The tests of a capability that is not declared are skipped, with the capability as the reason. The kit uses the process
ids of workers, so it requires a runtime that starts workers on this machine.
"""

from __future__ import annotations

import enum
import os
import re
import secrets
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import (
    Callback,
    DataParallelTrainer,
    FailureConfig,
    FailureKind,
    ResourceError,
    Result,
    RunCancelledError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerDiedError,
)
from drivetrain.plugin import Backend, BackendConfig, Runtime, load_plugin
from drivetrain_testing import _jobs, _runtimejobs
from drivetrain_testing._checks import forget_test_name
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._drivers import start_driver

__all__ = ["RuntimeCapability", "RuntimeConformance"]

_START_TIMEOUT_S = 120.0


class RuntimeCapability(enum.Enum):
    """A capability of a runtime that :class:`RuntimeConformance` tests if it is declared."""

    PROCESSES = "runs each rank in a separate process"
    EXIT_CODES = "reports the signal or exit code with which a process has exited"
    OUTPUT = "shows the output of rank 0, and writes the output of each rank to its log"
    STACKS = "returns the stacks of ranks that do not respond"
    REPLACES_RANKS = "replaces the processes of lost ranks while the other ranks continue"
    ELASTIC = "starts groups of different sizes within a run"
    ENDS_WITH_DRIVER = "ends all processes when the driver is killed with SIGKILL"


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run that several tests examine."""

    world_size: int
    result: Result
    observer: _jobs.Observer
    backend: _runtimejobs.WithVariables | None = None

    def facts(self, rank: int) -> dict[str, Any]:
        """Return the facts that a rank has reported about itself."""
        reports = self.observer.reports.get(rank)
        assert reports, f"expected reports of rank {rank}, got none"
        facts: dict[str, Any] = reports[0]["facts"]
        return facts


class RuntimeConformance:
    """Tests of a runtime. Derive a class from it, and set :attr:`runtime` and :attr:`capabilities`.

    Attributes:
        runtime: the name of an installed runtime, or a runtime class that can be imported and is called without
            arguments.
        capabilities: the capabilities that the runtime has. A declared capability must hold.
        hang_timeout_s: seconds without progress after which a run fails whose runtime has lost an event.
    """

    runtime: ClassVar[str | type[Runtime]]
    capabilities: ClassVar[Set[RuntimeCapability]] = frozenset()
    hang_timeout_s: ClassVar[float] = 60.0
    _runs: ClassVar[dict[str, _Run]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        runtime = getattr(cls, "runtime", None)
        if not isinstance(runtime, str) and not (isinstance(runtime, type) and issubclass(runtime, Runtime)):
            raise TypeError(f"{cls.__name__}: expected an attribute `runtime` with the name or the class of a runtime")
        for capability in cls.capabilities:
            if not isinstance(capability, RuntimeCapability):
                raise TypeError(f"{cls.__name__}.capabilities: expected RuntimeCapability, got {capability!r}")
        check_overrides(cls, RuntimeConformance)
        cls._runs = {}

    def driver_environment(self) -> Mapping[str, str]:
        """Return environment variables for the drivers that tests start in other processes, such as an address."""
        return {}

    @pytest.fixture
    def described(self, tmp_path_factory: pytest.TempPathFactory) -> _Run:
        """An undisturbed run. All tests of the class share it."""
        if "described" not in self._runs:
            backend = _runtimejobs.WithVariables()
            self._runs["described"] = self._fit(
                _runtimejobs.describe, tmp_path_factory.mktemp("described"), backend=backend
            )
        return self._runs["described"]

    @pytest.fixture
    def resumed(self, tmp_path_factory: pytest.TempPathFactory) -> _Run:
        """A run that failed once, because a rank was killed or, without processes, because it raised an exception."""
        if "resumed" not in self._runs:
            callbacks = [_jobs.KillsRank()] if self._has(RuntimeCapability.PROCESSES) else []
            self._runs["resumed"] = self._fit(
                _jobs.resume_after_a_kill,
                tmp_path_factory.mktemp("resumed"),
                callbacks=callbacks,
                max_failures=1,
                hang_timeout_s=self.hang_timeout_s,
            )
        return self._runs["resumed"]

    def _has(self, capability: RuntimeCapability) -> bool:
        return capability in self.capabilities

    def _require(self, capability: RuntimeCapability) -> None:
        if not self._has(capability):
            pytest.skip(f"{type(self).__name__} does not declare {capability}: {capability.value}")

    def _create_runtime(self) -> Runtime:
        runtime: Runtime = load_plugin("runtime", self.runtime)() if isinstance(self.runtime, str) else self.runtime()
        return runtime

    @property
    def _world_size(self) -> int:
        return 2 if self._has(RuntimeCapability.PROCESSES) else 1

    def _trainer(
        self,
        function: Callable[..., Any],
        directory: Path,
        *,
        config: Mapping[str, Any] | None = None,
        backend: Backend | None = None,
        callbacks: Sequence[Callback] = (),
        max_failures: int = 0,
        scaling: ScalingConfig | None = None,
        **run_config: Any,
    ) -> DataParallelTrainer:
        forget_test_name()
        return DataParallelTrainer(
            function,
            train_loop_config={"all_sum": None, **(config or {})},
            backend_config=backend or BackendConfig(),
            scaling_config=scaling or ScalingConfig(num_workers=self._world_size, runtime=self._create_runtime()),
            run_config=RunConfig(
                name="run",
                storage_path=directory,
                verbose=0,
                callbacks=list(callbacks),
                failure_config=FailureConfig(max_failures=max_failures),
                **{"start_timeout_s": _START_TIMEOUT_S, **run_config},
            ),
        )

    def _fit(self, function: Callable[..., Any], directory: Path, **options: Any) -> _Run:
        observer = _jobs.Observer()
        options["callbacks"] = [observer, *options.get("callbacks", ())]
        result = self._trainer(function, directory, **options).fit()
        return _Run(world_size=self._world_size, result=result, observer=observer, backend=options.get("backend"))

    def _fail(self, function: Callable[..., Any], directory: Path, **options: Any) -> TrainingFailedError:
        """Run a train function that fails, and return the error."""
        observer = _jobs.Observer()
        with pytest.raises(TrainingFailedError) as failed:
            self._trainer(function, directory, callbacks=[observer], **options).fit()
        running = observer.find_running()
        assert not running, f"expected no process to be left after a failure, got {running}"
        return failed.value

    # The runtime itself

    def test_runtime_has_a_name_and_accepts_workers(self) -> None:
        runtime, size = self._create_runtime(), self._world_size
        assert runtime.name, f"{type(runtime).__name__}.name: expected the runtime's name, got {runtime.name!r}"
        assert isinstance(type(runtime).detect(), bool), "detect(): expected True or False"
        scaling = ScalingConfig(num_workers=size, runtime=runtime)
        validated: object = runtime.validate(scaling)
        assert validated is None, f"validate(): expected None or an exception, got {validated!r}"
        room: object = runtime.room(scaling, (), frozenset())
        assert type(room) is int, f"room(): expected a number of workers, got {room!r}"
        assert room >= 1, f"room(): expected at least the workers that this kit starts, got {room}"

    # An undisturbed run

    def test_starts_as_many_workers_as_requested(self, tmp_path: Path) -> None:
        self._require(RuntimeCapability.PROCESSES)
        runtime = self._create_runtime()
        asks = _runtimejobs.AsksForRoom(runtime)
        scaling = ScalingConfig(num_workers=3, runtime=runtime)
        run = self._fit(_runtimejobs.describe, tmp_path, scaling=scaling, callbacks=[asks])
        pids = {rank: reports[0]["facts"]["pid"] for rank, reports in run.observer.reports.items()}
        assert len({*pids.values()}) == 3, f"expected 3 processes, got the process ids {pids} by rank"
        assert asks.running >= min(asks.idle, 3), (
            f"room(): expected a number that includes the 3 running workers, got {asks.running}, and {asks.idle} before"
        )

    def test_token_is_not_on_a_command_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._require(RuntimeCapability.PROCESSES)
        watch = _runtimejobs.WatchesCommandLines()
        monkeypatch.setattr(secrets, "token_bytes", watch.record(secrets.token_bytes))
        self._fit(_runtimejobs.describe, tmp_path, callbacks=[watch])
        assert not watch.found, (
            f"expected no token on a command line, which all users of a machine can read, got one on {watch.found}. "
            "Pass it in the environment, or in a file"
        )

    def test_reports_of_all_ranks_arrive_in_their_order(self, described: _Run) -> None:
        steps = list(range(1, _runtimejobs.REPORTS + 1))
        for rank in range(described.world_size):
            found = [metrics["step"] for metrics in described.observer.reports.get(rank, ())]
            assert found == steps, f"expected the reports {steps} of rank {rank}, got {found}"

    def test_train_function_runs_on_the_main_thread(self, described: _Run) -> None:
        for rank in range(described.world_size):
            facts = described.facts(rank)
            assert facts["is_main_thread"], f"rank {rank}: expected the main thread of the process"
            assert facts["handles_signals"], (
                f"rank {rank}: expected a signal handler of the train function to be called"
            )
            assert facts["working_directory"] == os.getcwd(), f"rank {rank}: expected the driver's working directory"

    def test_each_rank_has_its_own_process(self, described: _Run) -> None:
        pids = [described.facts(rank)["pid"] for rank in range(described.world_size)]
        if self._has(RuntimeCapability.PROCESSES):
            assert len({*pids, os.getpid()}) == len(pids) + 1, (
                f"expected a process per rank, got the process ids {pids}"
            )
        else:
            assert pids == [os.getpid()], "expected the train function to run in the driver's process"
        assert described.result.return_value == pids[0], "expected the value that rank 0 has returned"

    def test_workers_are_described_with_their_ranks(self, described: _Run) -> None:
        (workers,) = described.observer.workers
        ranks = [worker.rank for worker in workers]
        assert ranks == list(range(described.world_size)), f"expected each rank once and in order, got {ranks}"
        places = {(worker.node_rank, worker.local_rank) for worker in workers}
        assert len(places) == len(workers), f"expected a local rank per worker of a node, got {sorted(places)}"
        for worker in workers:
            facts = described.facts(worker.rank)
            assert facts["rank"] == worker.rank, f"expected rank {worker.rank}, got {facts['rank']}"
            assert facts["pid"] == facts["worker_pid"] == worker.pid, f"rank {worker.rank}: expected its process id"
            assert facts["world_size"] == described.world_size

    def test_workers_have_the_variables_of_their_ranks_and_of_the_backend(self, described: _Run) -> None:
        (workers,) = described.observer.workers
        for worker in workers:
            expected = {
                "RANK": str(worker.rank),
                "WORLD_SIZE": str(described.world_size),
                "LOCAL_RANK": str(worker.local_rank),
                _runtimejobs.WithVariables.OF_RUN: "of the run",
                _runtimejobs.WithVariables.OF_RANK: f"{worker.rank} of {described.world_size}",
            }
            for name, value in expected.items():
                found = described.facts(worker.rank)["variables"][name]
                assert found == value, f"rank {worker.rank}: expected the variable {name}={value}, got {found!r}"

    def test_group_calls_functions_on_the_workers(self, described: _Run) -> None:
        assert described.backend is not None
        expected = [f"{rank} of {described.world_size}" for rank in range(described.world_size)]
        assert described.backend.called == expected, (
            f"run(): expected one result per rank, got {described.backend.called}"
        )

    def test_checkpoint_has_the_files_of_all_ranks(self, described: _Run) -> None:
        assert described.result.checkpoint is not None, "expected a committed checkpoint, got none"
        with described.result.checkpoint.as_directory() as directory:
            found = {name for name in os.listdir(directory) if name.startswith("rank_")}
        assert found == {f"rank_{rank}.txt" for rank in range(described.world_size)}

    def test_output_of_each_rank_is_in_its_log(self, described: _Run) -> None:
        self._require(RuntimeCapability.OUTPUT)
        for rank in range(described.world_size):
            file = Path(described.result.path, "logs", f"rank_{rank}.log")
            log = file.read_text().splitlines() if file.exists() else "no file"
            expected = [f"rank {rank} complains", f"rank {rank} prints"]
            assert sorted(log) == expected, f"rank_{rank}.log: expected {expected}, got {log}"

    def test_no_process_is_left_after_a_success(self, described: _Run) -> None:
        running = described.observer.find_running()
        assert not running, f"expected no process to be left after a success, got {running}"

    def test_output_of_rank_0_is_shown_with_its_rank(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._require(RuntimeCapability.OUTPUT)
        self._fit(_runtimejobs.describe, tmp_path)
        shown = sorted(line for line in capfd.readouterr().out.splitlines() if "rank" in line)
        expected = ["[rank 0] rank 0 complains", "[rank 0] rank 0 prints"]
        assert shown == expected, f"expected the output {expected}, got {shown}"

    def test_second_run_of_one_driver_starts_in_a_clean_state(self, tmp_path: Path) -> None:
        self._require(RuntimeCapability.PROCESSES)
        for number in ("first", "second"):
            run = self._fit(_runtimejobs.leave_state_behind, tmp_path / number)
            assert run.result.return_value is False, f"expected new processes in the {number} run, got used ones"

    # Failures

    def test_exception_keeps_its_type_and_traceback(self, tmp_path: Path) -> None:
        error = self._fail(_runtimejobs.raise_deep_inside, tmp_path, hang_timeout_s=self.hang_timeout_s)
        cause, rank = error.__cause__, self._world_size - 1
        assert type(cause) is LookupError, f"expected the exception of the train function, got {cause!r}"
        assert error.rank == rank, f"expected rank {rank}, got {error.rank}"
        assert error.kind is FailureKind.USER_ERROR
        names = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
        expected = ["raise_deep_inside", *["fail_deep_inside"] * 3]
        assert names[-4:] == expected, f"expected a traceback that ends with {expected}, got {names}"

    def test_failed_run_resumes_from_its_checkpoint(self, resumed: _Run) -> None:
        value, size = resumed.result.return_value, resumed.world_size
        assert value["first"] == _jobs.KILLED_AFTER, f"expected to resume after step 2, got {value['first']}"
        assert value["state"] == _jobs.expected_state(0, _jobs.STEPS, size, sums=False)
        running = resumed.observer.find_running()
        assert not running, f"expected no process to be left, got {running}"

    def test_killed_rank_is_the_root_cause(self, resumed: _Run) -> None:
        self._require(RuntimeCapability.PROCESSES)
        (failure,) = resumed.observer.failures
        found = (failure.rank, failure.kind)
        assert found == (1, FailureKind.INFRASTRUCTURE), f"expected the killed rank 1, got: {failure.summary}"

    def test_exit_codes_are_reported(self, resumed: _Run, tmp_path: Path) -> None:
        self._require(RuntimeCapability.EXIT_CODES)
        summary = resumed.observer.failures[0].summary
        assert signal.SIGKILL.name in summary, f"expected SIGKILL in the message of a killed rank, got: {summary}"
        error = self._fail(_runtimejobs.exit_with_3, tmp_path, hang_timeout_s=self.hang_timeout_s)
        cause = error.__cause__
        assert isinstance(cause, WorkerDiedError), f"expected a WorkerDiedError, got {cause!r}"
        assert cause.exit_code == 3, f"expected exit code 3, got {cause.exit_code}"

    def test_hang_is_reported_with_the_stacks_of_all_ranks(self, tmp_path: Path) -> None:
        self._require(RuntimeCapability.STACKS)
        error = self._fail(_runtimejobs.hang, tmp_path, hang_timeout_s=4.0)
        assert error.kind is FailureKind.HANG, f"expected a hang, got: {error}"
        count = str(error.__cause__).count(f"in {_runtimejobs.wait_in_hang.__name__}")
        assert count == self._world_size, f"expected the stacks of {self._world_size} ranks, got {count}: {error}"

    def test_start_that_takes_too_long_names_the_missing_workers(self, tmp_path: Path) -> None:
        self._require(RuntimeCapability.PROCESSES)
        with pytest.raises((TrainingFailedError, ResourceError)) as failed:
            self._trainer(_runtimejobs.describe, tmp_path, start_timeout_s=1e-6).fit()
        message = str(failed.value.__cause__ or failed.value)
        assert "start_timeout_s" in message, f"expected a message that names start_timeout_s, got: {message}"
        missing = message.partition("still waiting for")[2] or message.partition("got a timeout")[2]
        assert re.search(r"\d", missing), f"expected a message with the missing workers or their number, got: {message}"

    # The end of the driver

    def test_cancelled_run_leaves_no_process(self, tmp_path: Path) -> None:
        observer, reported = _jobs.Observer(), threading.Event()
        notifies = _runtimejobs.CallsWhenAllReported(lambda _: reported.set())
        run = self._trainer(_runtimejobs.report_until_cancelled, tmp_path, callbacks=[observer, notifies]).start()
        assert reported.wait(_START_TIMEOUT_S), "expected all ranks to report"
        run.cancel()
        with pytest.raises(RunCancelledError):
            run.result(_START_TIMEOUT_S)
        running = observer.find_running()
        assert not running, f"expected no process to be left after a cancelled run, got {running}"

    def test_ctrl_c_leaves_no_process(self, tmp_path: Path) -> None:
        with start_driver(self.runtime, self._world_size, tmp_path, self.driver_environment()) as driver:
            errors = driver.interrupt()
            assert errors.rstrip().endswith("KeyboardInterrupt"), f"expected a KeyboardInterrupt, got:\n{errors}"
            running = driver.find_running()
            assert not running, f"expected no process to be left after Ctrl-C, got {running}"

    def test_killed_driver_leaves_no_process(self, tmp_path: Path) -> None:
        self._require(RuntimeCapability.ENDS_WITH_DRIVER)
        with start_driver(self.runtime, self._world_size, tmp_path, self.driver_environment()) as driver:
            driver.kill()
            running = driver.find_running()
            assert not running, f"expected no process to be left after SIGKILL of the driver, got {running}"

    # Changes of the group

    def test_lost_rank_is_replaced_while_the_other_continues(self, tmp_path: Path) -> None:
        self._require(RuntimeCapability.REPLACES_RANKS)
        os.mkfifo(tmp_path / "joined")
        run = self._fit(
            _runtimejobs.report_with_replacement,
            tmp_path / "runs",
            config={"joined": str(tmp_path / "joined")},
            backend=_runtimejobs.KeepsOthers(),
            max_failures=1,
            hang_timeout_s=self.hang_timeout_s,
        )
        (failure,) = run.observer.failures
        assert failure.survived, f"expected the other rank to continue, got: {failure.summary}"
        pids = {rank: {metrics["pid"] for metrics in reports} for rank, reports in run.observer.reports.items()}
        assert pids[0] == {run.result.return_value}, "expected rank 0 to keep its process"
        assert len(pids[1]) == 2, "expected a new process for rank 1"

    def test_elastic_run_grows(self, tmp_path: Path) -> None:
        self._require(RuntimeCapability.ELASTIC)
        runtime = _runtimejobs.WithRoom(self._create_runtime(), 1)
        scaling = ScalingConfig(num_workers=(1, 2), runtime=runtime, elastic_resize_monitor_interval_s=0.001)
        run = self._fit(
            _runtimejobs.grow,
            tmp_path,
            callbacks=[_runtimejobs.GrowsRoom(runtime)],
            scaling=scaling,
            hang_timeout_s=self.hang_timeout_s,
        )
        sizes = [len(workers) for workers in run.observer.workers]
        assert sizes == [1, 2], f"expected a group of 1 worker and then one of 2, got {sizes}"
        assert run.result.return_value == 2, "expected the second attempt to have two workers"
        assert not run.observer.failures, "expected no failure"
