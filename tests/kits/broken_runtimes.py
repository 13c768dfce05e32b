"""Runtimes with one mistake each, as classes of the conformance kit. ``test_broken_runtimes.py`` runs them."""

import atexit
import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from drivetrain._runtimes.inprocess import InProcessRuntime
from drivetrain._wire.events import Event, Exited, Reported
from drivetrain.plugin.runtimes import GroupSpec, LocalRuntime
from drivetrain_testing import RuntimeCapability, RuntimeConformance
from drivetrain_testing._runtimejobs import leave_state_behind


class Delegating:
    """A group that passes everything on to another group."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Broken(LocalRuntime):
    """The local runtime with a group that has a mistake."""

    group: Callable[[Any], Any] = Delegating

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[Any]:
        with super().launch(spec) as group:
            yield type(self).group(group)


class Kit(RuntimeConformance):
    runtime: Any = Broken
    capabilities = frozenset(RuntimeCapability)


class OnAnotherThread(Delegating):
    def pump(self, *args: Any) -> None:
        thread = threading.Thread(target=self.inner.pump, args=args)
        thread.start()
        thread.join()


class RunsOnAnotherThread(InProcessRuntime):
    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[Any]:
        with super().launch(spec) as group:
            yield OnAnotherThread(group)


class TestRunsOnAnotherThread(Kit):
    runtime = RunsOnAnotherThread
    capabilities = frozenset()


class Filtering(Delegating):
    """A group that changes or loses events."""

    def change(self, event: Event) -> Event | None:
        return event

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        def deliver_changed(event: Event) -> bool:
            changed = self.change(event)
            return changed is not None and deliver(changed)

        self.inner.pump(deliver_changed, timeout_s)


class WithoutReportsOfRank1(Filtering):
    def change(self, event: Event) -> Event | None:
        return None if isinstance(event, Reported) and event.rank == 1 else event


class LosesReportsOfRank1(Broken):
    group = WithoutReportsOfRank1


class TestLosesReportsOfRank1(Kit):
    runtime = LosesReportsOfRank1


class WithoutExits(Filtering):
    def change(self, event: Event) -> Event | None:
        return None if isinstance(event, Exited) else event


class IgnoresKilledRanks(Broken):
    group = WithoutExits


class TestIgnoresKilledRanks(Kit):
    runtime = IgnoresKilledRanks
    hang_timeout_s = 6.0


class WithoutExitCodes(Filtering):
    def change(self, event: Event) -> Event | None:
        return event._replace(exit_code=None) if isinstance(event, Exited) else event


class DoesNotKnowExitCodes(Broken):
    group = WithoutExitCodes


class TestClaimsExitCodes(Kit):
    runtime = DoesNotKnowExitCodes


class LeavesProcesses(LocalRuntime):
    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[Any]:
        launched = super().launch(spec)
        atexit.register(launched.__exit__, None, None, None)
        yield launched.__enter__()


class TestLeavesProcesses(Kit):
    runtime = LeavesProcesses


class SameLocalRank(Delegating):
    @property
    def workers(self) -> Any:
        return [replace(worker, local_rank=0) for worker in self.inner.workers]


class AssignsLocalRankTwice(Broken):
    group = SameLocalRank


class TestAssignsLocalRankTwice(Kit):
    runtime = AssignsLocalRankTwice


class SameRank(Delegating):
    @property
    def workers(self) -> Any:
        return [replace(worker, rank=0) for worker in self.inner.workers]


class AssignsRankTwice(Broken):
    group = SameRank


class TestAssignsRankTwice(Kit):
    runtime = AssignsRankTwice


class WithoutRank(Delegating):
    def train(self, tasks: Any) -> None:
        self.inner.run(forget_rank)
        self.inner.train(tasks)


def forget_rank() -> None:
    del os.environ["RANK"]


class DoesNotSetRank(Broken):
    group = WithoutRank


class TestDoesNotSetRank(Kit):
    runtime = DoesNotSetRank


class IgnoresEnvironment(LocalRuntime):
    def launch(self, spec: GroupSpec) -> Any:
        return super().launch(replace(spec, environment={}))


class TestIgnoresEnvironment(Kit):
    runtime = IgnoresEnvironment


class Reversed(Delegating):
    def run(self, fn: Any, /, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        return self.inner.run(fn, *args, ranks=ranks)[::-1]


class ReturnsResultsInReverse(Broken):
    group = Reversed


class TestReturnsResultsInReverse(Kit):
    runtime = ReturnsResultsInReverse


class TestClaimsProcesses(Kit):
    runtime = "inprocess"


class WithoutStacks(Delegating):
    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return {}


class ReturnsNoStacks(Broken):
    group = WithoutStacks


class TestClaimsStacks(Kit):
    runtime = ReturnsNoStacks


class WritesNoLogs(LocalRuntime):
    def launch(self, spec: GroupSpec) -> Any:
        return super().launch(replace(spec, output=replace(spec.output, log_directory=None)))


class TestClaimsOutput(Kit):
    runtime = WritesNoLogs


class WithUsedProcesses(Delegating):
    def train(self, tasks: Any) -> None:
        self.inner.run(leave_state_behind)
        self.inner.train(tasks)


class ReusesProcesses(Broken):
    group = WithUsedProcesses


class TestReusesProcesses(Kit):
    runtime = ReusesProcesses


class AlwaysStartsOne(LocalRuntime):
    def launch(self, spec: GroupSpec) -> Any:
        return super().launch(replace(spec, num_workers=1))


class TestClaimsElastic(Kit):
    runtime = AlwaysStartsOne


class StartsOneTooMany(LocalRuntime):
    def launch(self, spec: GroupSpec) -> Any:
        more = spec.num_workers + 1
        return super().launch(replace(spec, num_workers=more, scaling=replace(spec.scaling, num_workers=more)))


class TestStartsOneTooMany(Kit):
    runtime = StartsOneTooMany


class WithoutName(LocalRuntime):
    name = ""


class TestWithoutName(Kit):
    runtime = WithoutName


class RoomForNothing(LocalRuntime):
    def room(self, *args: Any) -> Any:
        return None


class TestRoomReturnsNone(Kit):
    runtime = RoomForNothing


class LaunchIsNoContextManager(LocalRuntime):
    def launch(self, spec: GroupSpec) -> Any:  # type: ignore[override]
        with super().launch(spec) as group:
            yield group


class TestLaunchIsNoContextManager(Kit):
    runtime = LaunchIsNoContextManager


class StartsAtMostTwo(LocalRuntime):
    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[Any]:
        with super().launch(replace(spec, num_workers=min(2, spec.num_workers))) as group:
            yield group


class TestStartsAtMostTwo(Kit):
    runtime = StartsAtMostTwo


class RoomWithoutRunning(LocalRuntime):
    def room(self, scaling: Any, running: Sequence[Any], avoided: frozenset[str]) -> int:
        return super().room(scaling, running, avoided) - len(running)


class TestRoomWithoutRunning(Kit):
    runtime = RoomWithoutRunning


class ShowsItsToken(LocalRuntime):
    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[Any]:
        token = secrets.token_bytes(32).hex()
        with (
            super().launch(spec) as group,
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", token]) as process,
        ):
            try:
                yield group
            finally:
                process.kill()


class TestShowsItsToken(Kit):
    runtime = ShowsItsToken
