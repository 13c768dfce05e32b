"""Backends that wrap the backend under test: to observe it, to fail at some point, or to use it in a worker."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain import (
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    TrainContext,
    TrainingFailedError,
    WorkerDiedError,
)
from drivetrain.plugin import Backend, BackendConfig, WorkerInfo
from drivetrain.plugin.backends import WorkerGroup, WrappedBackend
from drivetrain.plugin.checks import one_line
from drivetrain_testing._leftovers import ProcessState

__all__ = ["FailsInSetup", "Observed", "RunsInWorker", "UnreachableGroup", "Wrapped"]

_STARTING = ("preload", "preload_environment", "environment")
"""The attributes that the workers depend on. The runs of all tests have the same values, so they share a fork server.

``warmup`` is left empty: the start of each server would wait for these imports, which the tests do not need.
"""


class Wrapped(WrappedBackend):
    """A backend that behaves like another one, but imports no modules in advance except those in ``preload``."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.warmup = ()


class Observed(Wrapped):
    """Records what a backend returns in the rendezvous, and what it leaves behind in the driver and in workers.

    Args:
        inner: the backend.
        directory: the directory in which each worker writes a file when the session has ended.

    Attributes:
        mappings: the mappings of the rendezvous.
        left_in_driver: a description of each object that was left in the driver after ``close()``.
    """

    def __init__(self, inner: Backend, directory: Path) -> None:
        super().__init__(inner)
        self._directory = str(directory)
        self._states: tuple[ProcessState, ProcessState] | None = None  # before and after the rendezvous
        self.mappings: Sequence[Mapping[str, str]] = ()
        self.left_in_driver: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_states": None}

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        before = ProcessState.now()
        self.mappings = super().rendezvous(group)
        self._states = before, ProcessState.now()
        return self.mappings

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        before = ProcessState.now()
        with super().session(context, rendezvous):
            yield
        changes = before.changes(in_run=True)
        Path(self._directory, f"left_by_rank_{context.get_world_rank()}.json").write_text(json.dumps(changes))

    def close(self) -> None:
        super().close()
        if self._states is not None:
            before, started = self._states
            self.left_in_driver = before.changes(in_run=True, started=started)

    def left_in_workers(self) -> dict[int, list[str]]:
        """Return a description of each object that was left in a worker after the session, by rank."""
        files = Path(self._directory).glob("left_by_rank_*.json")
        return {int(file.stem.rpartition("_")[2]): json.loads(file.read_text()) for file in files}


class FailsInSetup(Wrapped):
    """A backend that fails on rank 1 before the train function is called."""

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        with super().session(context, rendezvous):
            if context.get_world_rank() == 1:
                raise ConnectionRefusedError("the setup of rank 1 fails in this test")
            yield


class RunsInWorker(Backend):
    """In a worker, runs train functions in the driver's own process: this worker is the driver of these runs.

    Args:
        config: the configuration of the backend under test.
        directory: an empty directory.

    Attributes:
        problems: a description of each problem.
    """

    def __init__(self, config: BackendConfig, directory: Path) -> None:
        inner = config.create()
        for name in _STARTING:
            setattr(self, name, getattr(inner, name))
        self._config = config
        self._directory = str(directory)
        self.problems: list[str] = []

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        (self.problems,) = group.run(_run_in_this_process, self._config, self._directory)
        return [{}]

    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _run_in_this_process(config: BackendConfig, directory: str) -> list[str]:
    """Run three train functions in this process: one that returns, one that raises, and one that returns again."""
    tempfile.tempdir = str(Path(directory, "temporary"))
    Path(tempfile.tempdir).mkdir()
    found: list[str] = []
    variables = ProcessState.now()
    before = None
    for name, function in (("first", _returns), ("second", _raises), ("third", _returns)):
        problem = _fit_in_this_process(config, function, name, directory)
        if problem is not None:
            return [*found, f"the {name} run in the same process: {problem}"]
        end = "returned" if function is _returns else "raised an exception"
        # The first run imports the framework, which may keep threads and sockets for the rest of the process.
        changes = (variables if before is None else before).changes(in_run=before is None)
        found += [f"after the train function had {end}, the process still had {change}" for change in changes]
        before = before or ProcessState.now()
    return found


def _fit_in_this_process(config: BackendConfig, function: Callable[[], str], name: str, directory: str) -> str | None:
    trainer = DataParallelTrainer(
        function,
        backend_config=config,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=directory, verbose=0),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        cause = error.__cause__
        return None if function is _raises and isinstance(cause, ZeroDivisionError) else one_line(error)
    return None if result.return_value == "returned" else "expected the exception of the train function, got a success"


def _returns() -> str:
    return "returned"


def _raises() -> str:
    raise ZeroDivisionError("the train function raises in this test")


class UnreachableGroup:
    """A group of workers that do not respond, to make a rendezvous fail.

    Args:
        workers: the workers.
        attempt: information about the attempt.
    """

    def __init__(self, workers: Sequence[WorkerInfo], attempt: Any) -> None:
        self.workers = workers
        self.attempt = attempt

    def run(self, fn: Callable[..., Any], /, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Raise an exception, like a group whose worker has exited."""
        raise WorkerDiedError("the workers do not respond in this test")
