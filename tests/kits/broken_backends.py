"""Backends with one mistake each, as classes of the conformance kit. ``test_broken_backends.py`` runs them."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from drivetrain import FailureKind, ScalingConfig, TrainContext
from drivetrain.plugin import Backend, BackendConfig, WorkerInfo
from drivetrain.plugin.backends import WorkerGroup
from drivetrain_testing import BackendConformance
from tests.kits.eager_backend import EagerConfig
from tests.kits.sound_backend import ConfigOf, SoundBackend


class SwallowsExceptions(SoundBackend):
    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        with contextlib.suppress(Exception):
            yield


class TestSwallowsExceptions(BackendConformance):
    config = ConfigOf(kind=SwallowsExceptions)


class StaysInItsGroup(SoundBackend):
    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        if hasattr(sys, "broken_group"):
            raise RuntimeError("this process is in a group already")
        sys.broken_group = True  # type: ignore[attr-defined]
        yield


class TestStaysInItsGroup(BackendConformance):
    config = ConfigOf(kind=StaysInItsGroup)


class LeavesVariable(SoundBackend):
    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        os.environ["BROKEN_PORT"] = "1234"
        yield


class TestLeavesVariable(BackendConformance):
    config = ConfigOf(kind=LeavesVariable)


class LeavesVariableAfterException(SoundBackend):
    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        os.environ["BROKEN_PORT"] = "1234"
        yield
        del os.environ["BROKEN_PORT"]


class TestLeavesVariableAfterException(BackendConformance):
    config = ConfigOf(kind=LeavesVariableAfterException)


class LeavesThread(SoundBackend):
    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        threading.Thread(target=threading.Event().wait, name="broken sender", daemon=True).start()
        yield


class TestLeavesThread(BackendConformance):
    config = ConfigOf(kind=LeavesThread)


class LeavesSocketAfterException(SoundBackend):
    opened: ClassVar[list[socket.socket]] = []

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        listener = socket.socket()
        self.opened.append(listener)
        yield
        listener.close()


class TestLeavesSocketAfterException(BackendConformance):
    config = ConfigOf(kind=LeavesSocketAfterException)


class LeavesThreadOfConstructor(SoundBackend):
    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, name="drivetrain-broken", daemon=True).start()


class TestLeavesThreadOfConstructor(BackendConformance):
    config = ConfigOf(kind=LeavesThreadOfConstructor)


class LeavesThreadInDriver(SoundBackend):
    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        threading.Thread(target=threading.Event().wait, name="broken tracker", daemon=True).start()
        return super().rendezvous(group)


class TestLeavesThreadInDriver(BackendConformance):
    config = ConfigOf(kind=LeavesThreadInDriver)


class LeavesProcessAfterFailure(SoundBackend):
    def __init__(self) -> None:
        self.process: Any = None

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        script = f"import os, time\nwhile os.getppid() == {os.getpid()}: time.sleep(1)"
        process = subprocess.Popen([sys.executable, "-c", script])
        process.returncode = 0  # so that the garbage collector does not warn about it
        group.run(os.getpid)
        self.process = process
        return super().rendezvous(group)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()


class TestLeavesProcessAfterFailure(BackendConformance):
    config = ConfigOf(kind=LeavesProcessAfterFailure)


class ReturnsOneMappingTooFew(SoundBackend):
    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        return super().rendezvous(group)[1:]


class TestReturnsOneMappingTooFew(BackendConformance):
    config = ConfigOf(kind=ReturnsOneMappingTooFew)


class ReturnsNumbers(SoundBackend):
    def rendezvous(self, group: WorkerGroup) -> Any:
        return [{"port": 1234} for _ in group.workers]


class TestReturnsNumbers(BackendConformance):
    config = ConfigOf(kind=ReturnsNumbers)


class MisspellsRankEnvironment(SoundBackend):
    def rank_enviroment(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
        return {"RANK": str(workers.index(worker))}


class TestMisspellsRankEnvironment(BackendConformance):
    config = ConfigOf(kind=MisspellsRankEnvironment)


class NeedsTwoWorkers(SoundBackend):
    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        return [{"next": group.workers[1].ip} for _ in group.workers]


class TestNeedsTwoWorkers(BackendConformance):
    config = ConfigOf(kind=NeedsTwoWorkers)


class TestImportsFramework(BackendConformance):
    config = EagerConfig()
    framework = "wave"


@dataclass(frozen=True, kw_only=True)
class LockedConfig(BackendConfig):
    lock: Any = field(default_factory=threading.Lock)

    def create(self) -> Backend:
        return SoundBackend()


class TestConfigCannotBePickled(BackendConformance):
    config = LockedConfig()


class ClassifyRaises(SoundBackend):
    def classify(self, error: BaseException) -> FailureKind | None:
        return FailureKind.OUT_OF_MEMORY if "out of memory" in str(error) else None


class TestClassifyRaises(BackendConformance):
    config = ConfigOf(kind=ClassifyRaises)


class ClassifiesEverything(SoundBackend):
    def classify(self, error: BaseException) -> FailureKind | None:
        return FailureKind.OUT_OF_MEMORY


class TestClassifiesEverything(BackendConformance):
    config = ConfigOf(kind=ClassifiesEverything)


class YieldsTwice(SoundBackend):
    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        yield
        yield


class TestYieldsTwice(BackendConformance):
    config = ConfigOf(kind=YieldsTwice)


class NeverYields(SoundBackend):
    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        yield from ()


class TestNeverYields(BackendConformance):
    config = ConfigOf(kind=NeverYields)


class MisspelledConfig(BackendConfig):
    def creat(self) -> Backend:
        return SoundBackend()


class TestMisspelledCreate(BackendConformance):
    config = MisspelledConfig()


class ClosesOnce(SoundBackend):
    def __init__(self) -> None:
        self.servers = ["a server"]

    def close(self) -> None:
        self.servers.pop()


class TestClosesOnce(BackendConformance):
    config = ConfigOf(kind=ClosesOnce)


class ValidateReturnsBool(SoundBackend):
    def validate(self, scaling: ScalingConfig) -> Any:
        return scaling.max_workers > 0


class TestValidateReturnsBool(BackendConformance):
    config = ConfigOf(kind=ValidateReturnsBool)


class EnvironmentHasNumbers(SoundBackend):
    environment: ClassVar[Any] = {"BROKEN_THREADS": 4}


class TestEnvironmentHasNumbers(BackendConformance):
    config = ConfigOf(kind=EnvironmentHasNumbers)


class OneRunPerDriver(SoundBackend):
    in_use: ClassVar[list[str]] = []

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        if self.in_use:
            raise RuntimeError("the port is in use")
        self.in_use.append("the port")
        return super().rendezvous(group)

    def close(self) -> None:
        self.in_use.clear()


class TestOneRunPerDriver(BackendConformance):
    config = ConfigOf(kind=OneRunPerDriver)
