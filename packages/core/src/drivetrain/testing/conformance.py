"""The conformance kit for backends, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain.testing import BackendConformance

    class TestMyBackend(BackendConformance):
        config = MyConfig()

If the framework can sum a number over all ranks, define that too::

        @staticmethod
        def all_sum(value: float) -> float:
            return my_framework.all_reduce(value)

A test that cannot pass for a backend must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain._driver.result import Result
from drivetrain._driver.trainer import DataParallelTrainer
from drivetrain._hooks.backend import Backend, BackendConfig, WorkerGroup
from drivetrain._hooks.callback import Callback
from drivetrain._hooks.context import Run, TrainContext, WorkerInfo
from drivetrain._worker.session import get_context, report
from drivetrain.config import FailureConfig, RunConfig, ScalingConfig
from drivetrain.errors import FailureKind, TrainingFailedError

__all__ = ["BackendConformance", "check_overrides"]

_END_S = 20.0


class BackendConformance:
    """Tests of a backend on real worker processes. Derive a class from it and set :attr:`config`.

    Attributes:
        config: the configuration whose backend is tested.
        all_sum: sums a number over all ranks, called on every rank. None if the framework has no such operation; the
            tests that need it are then skipped.
        framework: the import name of the framework; None if the backend has none. The test that the configuration does
            not need the framework is then skipped.
        world_sizes: the numbers of workers to test with.
        runtimes: the runtimes to test on.
    """

    config: ClassVar[BackendConfig]
    all_sum: ClassVar[Callable[[float], float] | None] = None
    framework: ClassVar[str | None] = None
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    runtimes: ClassVar[Sequence[str]] = ("local",)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(getattr(cls, "config", None), BackendConfig):
            raise TypeError(f"{cls.__name__}: expected an attribute `config` with a BackendConfig")
        check_overrides(cls, BackendConformance)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on every runtime in :attr:`runtimes`."""
        if "fit" in metafunc.fixturenames:
            metafunc.parametrize("fit", self.runtimes, indirect=True)

    @pytest.fixture
    def fit(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Result]]:
        """Yield a function that runs a train function on two workers. Check afterwards that all workers have exited."""
        watcher = _WorkerWatcher()

        def run(
            function: Callable[[dict[str, Any]], Any],
            *,
            backend: Backend | BackendConfig | None = None,
            max_failures: int = 0,
            **config: Any,
        ) -> Result:
            return DataParallelTrainer(
                function,
                train_loop_config={"all_sum": type(self).all_sum, "directory": str(tmp_path), **config},
                backend_config=backend or self.config,
                scaling_config=ScalingConfig(num_workers=2, runtime=request.param),
                run_config=RunConfig(
                    storage_path=tmp_path,
                    verbose=0,
                    callbacks=[watcher],
                    failure_config=FailureConfig(max_failures=max_failures),
                    start_timeout_s=120,
                ),
            ).fit()

        yield run
        watcher.assert_exited()

    def test_train_function_runs_on_every_rank_on_the_main_thread(self, fit: Callable[..., Result]) -> None:
        metrics = fit(_report_facts).metrics
        assert metrics["main_thread"] == 2, "both ranks run on the main thread of their process"

    def test_world_facts_agree_with_the_environment(self, fit: Callable[..., Result]) -> None:
        metrics = fit(_report_facts).metrics
        assert metrics["world_size"] == 2
        assert metrics["ranks"] == 1, "ranks 0 and 1 add up to 1"
        assert metrics["environment_agrees"] == 2

    def test_ranks_exchange_values(self, fit: Callable[..., Result]) -> None:
        self._require_all_sum()
        assert fit(_exchange).return_value == 3

    def test_a_second_run_of_one_driver_works(self, fit: Callable[..., Result]) -> None:
        fit(_report_facts)
        metrics = fit(_report_facts).metrics
        assert metrics["world_size"] == 2

    def test_failure_during_setup_is_reported_and_stops_the_other_ranks(self, fit: Callable[..., Result]) -> None:
        with pytest.raises(TrainingFailedError, match="rank 1 failed while setting up") as caught:
            fit(_report_facts, backend=_FailsInSetup(self.config.create()))
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    def test_exception_in_the_train_function_surfaces(self, fit: Callable[..., Result]) -> None:
        with pytest.raises(TrainingFailedError) as caught:
            fit(_raise_on_rank_1)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.rank == 1

    def test_killed_rank_is_the_root_cause(self, fit: Callable[..., Result]) -> None:
        with pytest.raises(TrainingFailedError) as caught:
            fit(_die_on_rank_1)
        assert caught.value.rank == 1
        assert caught.value.kind is FailureKind.INFRASTRUCTURE

    def test_killed_rank_is_replaced(self, fit: Callable[..., Result]) -> None:
        assert fit(_die_once_on_rank_1, max_failures=1).return_value == 1, "the second attempt succeeds"

    def _require_all_sum(self) -> None:
        if type(self).all_sum is None:
            pytest.skip(f"{type(self).__name__} declares no all_sum")


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


class _WorkerWatcher(Callback):
    """Collects the process ids of the workers, and checks that the workers have exited."""

    def __init__(self) -> None:
        self._pids: list[int] = []

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self._pids += [worker.pid for worker in workers]

    def assert_exited(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                watched = os.pidfd_open(pid)
                try:
                    assert _exits_within(watched, _END_S), f"worker process {pid} is still running"
                finally:
                    os.close(watched)


def _exits_within(process: int, seconds: float) -> bool:
    import select

    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class _FailsInSetup(Backend):
    """A backend that wraps another backend, and fails on rank 1 before the train function is called."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = inner.name
        self.preload = inner.preload

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        return self._inner.rendezvous(group)

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        with self._inner.session(context, rendezvous):
            if context.get_world_rank() == 1:
                raise ConnectionRefusedError("the setup of rank 1 fails in this test")
            yield

    def close(self) -> None:
        self._inner.close()


def _report_facts(config: dict[str, Any]) -> None:
    context = get_context()
    agrees = os.environ["RANK"] == str(context.get_world_rank()) and os.environ["WORLD_SIZE"] == str(
        context.get_world_size()
    )
    report(
        {
            "world_size": context.get_world_size(),
            "ranks": context.get_world_rank(),
            "main_thread": int(threading.current_thread() is threading.main_thread()),
            "environment_agrees": int(agrees),
        },
        reduce={"ranks": "sum", "main_thread": "sum", "environment_agrees": "sum"},
    )


def _exchange(config: dict[str, Any]) -> float:
    total: float = config["all_sum"](float(get_context().get_world_rank() + 1))
    return total


def _raise_on_rank_1(config: dict[str, Any]) -> None:
    if get_context().get_world_rank() == 1:
        raise ZeroDivisionError("rank 1 raises in this test")
    _wait_to_be_killed(config)


def _die_on_rank_1(config: dict[str, Any]) -> None:
    if get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_to_be_killed(config)


def _die_once_on_rank_1(config: dict[str, Any]) -> int:
    if get_context().attempt == 0:
        _die_on_rank_1(config)
    return get_context().attempt


def _wait_to_be_killed(config: dict[str, Any]) -> None:
    """Wait until this process is killed, in a collective operation if the backend has one."""
    if config["all_sum"] is not None:
        config["all_sum"](0.0)
    threading.Event().wait(_END_S)
    raise TimeoutError(f"this rank was not killed within {_END_S:g} s (at {time.time():.0f})")
