"""A deterministic simulation of a run: the real driver with simulated workers, on a virtual clock.

The controller, the attempts, the matching of reports, the manifest and the failure policy are the real ones. The worker
group is simulated: ranks report, store checkpoints, wait, fail and are lost at times that a seed determines, and their
messages arrive after seeded delays, in order for each rank. A simulation of hours takes milliseconds, and the same seed
always gives the same run.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain import Callback, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, StorageError
from drivetrain._base.console import Console
from drivetrain._base.interrupts import Interrupts
from drivetrain._driver.controller import Controller
from drivetrain._driver.outcomes import RunFailed, Succeeded
from drivetrain._driver.pending import SHORT_WAIT_S, PendingCheckpoints
from drivetrain._driver.policies import make_policy
from drivetrain._driver.reports import ReportMatcher
from drivetrain._driver.services import RunServices
from drivetrain._driver.tasks import TaskFactory
from drivetrain._hooks.backend import NoBackend
from drivetrain._hooks.callback import Callbacks
from drivetrain._hooks.context import Run
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.layout import checkpoint_name
from drivetrain._storage.manifest import CheckpointManager, read_manifest
from drivetrain._wire.commands import CountSteps, Renumber, RunningTaskCommand, StopAfter
from drivetrain._wire.events import (
    Draining,
    Event,
    Exited,
    Failed,
    FilesAnnounced,
    PhaseEntered,
    PreemptionPolled,
    RankState,
    Renumbered,
    Reported,
    ReportNumber,
    Returned,
    SigtermReceived,
    StepsCounted,
    Uploaded,
)
from drivetrain._wire.task import TrainTask
from drivetrain.plugin import Failure, FailurePolicy, Runtime, WorkerInfo
from tests.support import local_storage

FAULTS = ("exit", "exception", "hang", "sigterm", "node", "partition", "storage", "start", "drain")
HANG_TIMEOUT_S = 100.0
START_TIMEOUT_S = 60.0


class Violation(BaseException):
    """A promise of the driver does not hold. The driver handles exceptions of other classes itself."""


def require(holds: bool, promise: str) -> None:
    """Raise an error if a promise does not hold."""
    if not holds:
        raise Violation(promise)


class Clock:
    """The virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class InstantPoll:
    """Replaces ``select.poll`` of the controller, which waits before a retry: the virtual clock advances instead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def register(self, descriptor: int, events: int) -> None:
        """Ignore the descriptor: nothing interrupts a simulated run."""

    def poll(self, milliseconds: float) -> list[Any]:
        """Wait."""
        self._clock.now += milliseconds / 1000 + 1e-6
        return []


@dataclass
class Scenario:
    """The properties of a run that its seed determines.

    Attributes:
        world_size: the number of ranks.
        steps: the number of steps that each rank takes.
        every: the number of steps between two checkpoints.
        ranks_per_node: the number of ranks on each node.
        delay_s: the maximum delay of a message.
        polls: True if the ranks poll for preemption notices.
        uploads_later: True if checkpoints are uploaded in the background.
        combines: True if the ranks combine a metric, so that the reports of rank 0 wait for the other ranks.
        uneven: True if two of three ranks take fewer steps than the others.
        savers: the number of ranks that contribute to checkpoints, the lowest ones.
        declares: True if the reports declare the ranks that contribute.
        silent: True if the other ranks do not report.
        faults: how often each attempt is disturbed.
        kinds: the kinds of faults.
    """

    world_size: int
    steps: int
    every: int
    ranks_per_node: int
    delay_s: float
    polls: bool
    uploads_later: bool
    combines: bool
    uneven: bool
    savers: int
    declares: bool
    silent: bool
    faults: int
    kinds: Sequence[str]

    @classmethod
    def of(cls, seed: random.Random, sizes: Sequence[int]) -> Scenario:
        """Choose a scenario."""
        world_size = seed.choice(sizes)
        combines, uneven = seed.random() < 0.4, seed.random() < 0.2
        return cls(
            world_size=world_size,
            steps=seed.randint(1, 12),
            every=seed.randint(1, 4),
            ranks_per_node=seed.choice((1, 2, 8)),
            delay_s=seed.choice((0.0, 0.01, 5.0)),
            polls=seed.random() < 0.5,
            uploads_later=seed.random() < 0.3,
            combines=combines,
            uneven=uneven,
            savers=seed.choice((1, world_size, world_size, seed.randint(1, world_size))),
            declares=seed.random() < 0.3 and not uneven,
            silent=seed.random() < 0.3 and not combines,
            faults=seed.choice((0, 1, 1, 2, 3)),
            kinds=seed.sample(FAULTS, seed.randint(1, len(FAULTS))),
        )

    def steps_of(self, rank: int) -> int:
        """Return the number of steps that a rank takes."""
        return max(1, self.steps - rank % 3) if self.uneven else self.steps


class Rank:
    """A simulated rank: it takes steps, reports after each one, and performs the driver's commands."""

    def __init__(self, group: SimulatedGroup, task: TrainTask) -> None:
        self.number = task.context.get_world_rank()
        self.steps = 0
        self.alive = True
        self.ended = False
        self.free_at = 0.0  # the time at which the last message arrives
        self._group = group
        self._report = task.last_report
        self._step = _saved_step(task)
        self._polled = False
        self._waits = False
        self._has_next_step = False
        self._stop: int | None = None
        for state in (RankState.LOADING, RankState.SETTING_UP):
            self.send(PhaseEntered(self.number, state, group.clock()))
        group.after(group.seed.uniform(0.1, 3), self._begin)

    def _begin(self) -> None:
        if self.alive:
            self.send(PhaseEntered(self.number, RankState.TRAINING, self._group.clock()))
            self._schedule()

    def _schedule(self) -> None:
        if self._has_next_step:
            return
        self._has_next_step = True
        slow = 10.0 if self._group.seed.random() < 0.05 else 1.0
        self._group.after(slow * self._group.seed.uniform(0.1, 2), self._take_step)

    def _take_step(self) -> None:
        self._has_next_step = False
        if not self.alive or self._waits:
            return
        scenario = self._group.scenario
        if scenario.polls:
            if not self._polled:
                self._polled = True
                self.send(PreemptionPolled(self.number))
            self.steps += 1
        stopping = self._stop is not None and self.steps >= self._stop
        if self._step >= scenario.steps_of(self.number):
            self._end(Returned(self.number, self._step))
            return
        self._step += 1
        self._report_step(with_checkpoint=stopping or self._step % scenario.every == 0)
        if stopping:
            self._end(Returned(self.number, self._step, True))
        else:
            self._schedule()

    def _report_step(self, *, with_checkpoint: bool) -> None:
        number, iteration = self._report.number + 1, self._report.iteration + 1
        self._report = ReportNumber(number, iteration)
        scenario = self._group.scenario
        files, directory, ranks = None, None, None
        with_checkpoint &= self.number < scenario.savers
        if scenario.silent and self.number >= scenario.savers:
            return
        if with_checkpoint:
            self.send(FilesAnnounced(self.number, number))
            directory = checkpoint_name(number)
            files = self._group.store(directory, self.number, self._step)
            ranks = tuple(range(scenario.savers)) if scenario.declares else None
        later = scenario.uploads_later and with_checkpoint
        metrics = {"step": self._step, "loss": 1.0}
        reduce = {"loss": "mean"} if scenario.combines else None
        now = self._group.clock()
        event = Reported(self.number, number, iteration, now, metrics, None if later else files, reduce, directory)
        self.send(event._replace(checkpoint_ranks=ranks))
        if later and files is not None:
            uploaded = Uploaded(self.number, number, files)
            self._group.after(self._group.seed.uniform(0, 3), lambda: self.alive and self.send(uploaded))

    def _end(self, event: Event) -> None:
        """End the train function, once the background uploads have been sent."""
        self._group.after(4.0, lambda: self._send_last(event))

    def _send_last(self, event: Event) -> None:
        if self.alive and not self.ended:
            self.ended = True
            self.send(event)

    def perform(self, command: RunningTaskCommand) -> None:
        """Perform a command as soon as it arrives."""
        if not self.alive or self.ended:
            return
        match command:
            case CountSteps():
                self._waits = True
                self.send(StepsCounted(self.number, self.steps))
            case StopAfter():
                self._waits, self._stop = False, command.step
                self._schedule()
            case Renumber():
                self._report = command.last_report
                self.send(Renumbered(self.number))

    def send(self, event: Event) -> None:
        """Send a message to the driver. The messages of a rank arrive in order."""
        group = self._group
        node = self.number // group.scenario.ranks_per_node
        arrival = group.clock() + group.seed.uniform(0, group.scenario.delay_s)
        self.free_at = max(self.free_at, arrival, group.unreachable_until.get(node, 0.0))
        group.at(self.free_at, lambda: event)

    def lose(self, reason: str) -> None:
        """End the process. Its earlier messages still arrive."""
        if self.alive and not self.ended:
            self.alive = False
            self.send(Exited(self.number, -9, reason))

    def fail(self) -> None:
        """Raise an exception in the train function."""
        if self.alive and not self.ended:
            self.alive = False
            error = ValueError(f"raised by rank {self.number}")
            self.send(Failed(self.number, self._group.clock(), RankState.TRAINING, error))

    def terminate(self) -> None:
        """Receive SIGTERM."""
        if self.alive and not self.ended:
            self.send(SigtermReceived(self.number, self._polled))
            if not self._polled:
                self.lose("")


class SimulatedGroup:
    """The workers of one attempt, and the events that are still to come."""

    def __init__(self, simulation: Simulation, attempt: int) -> None:
        self.simulation = simulation
        self.scenario = simulation.scenario
        self.clock = simulation.clock
        self.seed = simulation.seed
        self.attempt = attempt
        self.unreachable_until: dict[int, float] = {}
        self.faulty: set[int] = set()
        self.workers = tuple(
            WorkerInfo(
                rank=rank,
                local_rank=rank % self.scenario.ranks_per_node,
                node_rank=rank // self.scenario.ranks_per_node,
                node_id=f"node-{rank // self.scenario.ranks_per_node}",
                hostname=f"host-{rank // self.scenario.ranks_per_node}",
                ip="127.0.0.1",
                pid=1000 * attempt + rank + 1,
            )
            for rank in range(self.scenario.world_size)
        )
        self._ranks: list[Rank] = []
        self._agenda: list[tuple[float, int, Callable[[], Event | object]]] = []
        self._order = itertools.count()

    def at(self, moment: float, action: Callable[[], Event | object]) -> None:
        """Schedule an action, or the arrival of the event that the action returns."""
        heapq.heappush(self._agenda, (moment, next(self._order), action))

    def after(self, seconds: float, action: Callable[[], Event | object]) -> None:
        """Schedule an action."""
        self.at(self.clock() + seconds, action)

    def store(self, directory: str, rank: int, step: int) -> dict[str, StoredFile]:
        """Store a rank's file of a checkpoint."""
        file = self.simulation.directory / directory / f"rank_{rank}"
        while not file.exists():  # a thread of the driver may be deleting an outdated checkpoint with this name
            with contextlib.suppress(FileNotFoundError):
                file.parent.mkdir(exist_ok=True)
                file.write_text(str(step))
        return {file.name: StoredFile(len(str(step)))}

    def run(self, fn: Callable[..., Any], /, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a function once for each rank."""
        return [None for _ in (self.workers if ranks is None else ranks)]

    def train(self, tasks: Sequence[TrainTask]) -> None:
        """Start the ranks, and choose when they are disturbed."""
        simulation = self.simulation
        latest = simulation.latest.name if simulation.latest is not None else None
        simulation.note_start()
        for task in tasks:
            resumed = None if task.checkpoint is None else Path(task.checkpoint.path).name
            require(resumed == latest, "a run resumes from the latest committed checkpoint")
            require(task.last_report.number >= simulation.highest_number, "no report number is used twice")
        self._ranks = [Rank(self, task) for task in tasks]
        faults = self.seed.randint(0, self.scenario.faults) if self.attempt < 20 else 0
        for _ in range(faults):
            self.after(self.seed.uniform(0, 2.0 * self.scenario.steps + 4), self._disturb)

    def _disturb(self) -> None:
        kind, rank = self.seed.choice(self.scenario.kinds), self.seed.choice(self._ranks)
        node = rank.number // self.scenario.ranks_per_node
        neighbors = [other for other in self._ranks if other.number // self.scenario.ranks_per_node == node]
        self.simulation.trace.append((self.clock(), "fault", kind, rank.number))
        match kind:
            case "exit":
                self.faulty.add(rank.number)
                rank.lose("")
            case "exception":
                self.faulty.add(rank.number)
                rank.fail()
            case "hang":
                rank.alive = False
            case "sigterm":
                self.faulty.add(rank.number)
                rank.terminate()
            case "node":
                for lost in neighbors:
                    self.faulty.add(lost.number)
                    lost.lose("was lost with its node")
            case "drain":
                numbers = tuple(other.number for other in neighbors)
                end = self.clock() + self.seed.uniform(1, 40)
                told = self.seed.choice((end, None))
                self.after(self.seed.uniform(0, 2), lambda: Draining(numbers, told, "the node is drained"))
                for lost in neighbors:
                    self.faulty.add(lost.number)
                    self.at(end, partial(lost.lose, "was lost with its node"))
            case "partition":
                self.unreachable_until[node] = self.clock() + self.seed.uniform(1, 40)
            case "storage":
                self.simulation.refused_commits = self.seed.randint(1, 2)

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        """Send a command, which arrives after a delay."""
        for rank in ranks:
            delay = self.seed.uniform(0, self.scenario.delay_s)
            self.after(delay, partial(self._ranks[rank].perform, command))

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        """Advance the clock to the next event, or by the timeout."""
        if timeout_s is None or timeout_s > 1e4:
            raise Violation(f"every wait has a deadline, got {timeout_s}")
        deadline = self.clock() + max(0.0, timeout_s)
        while self._agenda and self._agenda[0][0] <= deadline:
            moment, _, action = heapq.heappop(self._agenda)
            self.clock.now = max(self.clock.now, moment)
            event = action()
            if isinstance(event, tuple):
                self.simulation.note_arrival(self, event)  # type: ignore[arg-type]
                deliver(event)  # type: ignore[arg-type]
                self.simulation.check()
                return
        self.clock.now = max(self.clock.now, deadline)

    @contextlib.contextmanager
    def woken_by(self, future: Any) -> Iterator[None]:
        """Unused: the backend does not replace ranks."""
        yield

    def replace(self, ranks: Sequence[int]) -> None:
        """Unused: the backend does not replace ranks."""
        raise NotImplementedError

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return no stacks."""
        return {}

    def park(self) -> bool:
        """Return False."""
        return False

    def reuse(self, spec: Any) -> bool:
        """Return False."""
        return False


class SimulatedRuntime(Runtime):
    """Starts simulated groups."""

    name = "simulated"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def validate(self, scaling: ScalingConfig) -> None:
        """Accept everything."""

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Return the number of workers."""
        return self._simulation.scenario.world_size

    @contextlib.contextmanager
    def launch(self, spec: Any) -> Iterator[SimulatedGroup]:
        """Start a group. Starting takes time, and may fail."""
        simulation = self._simulation
        simulation.clock.now += simulation.seed.uniform(0, 5)
        attempt, simulation.launched = simulation.launched, simulation.launched + 1
        simulation.reported_checkpoints.clear()
        simulation.group = None
        if "start" in simulation.scenario.kinds and attempt < 20 and simulation.seed.random() < 0.1:
            simulation.stopped += 1
            raise StorageError("the group cannot be started")
        simulation.group = group = simulation.group_class(simulation, attempt)
        try:
            yield group
        finally:
            simulation.check_attempt(group)
            simulation.stopped += 1


class Recorder(Callback):
    """Records the calls of the driver."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def on_report(self, run: Any, report: Any) -> None:
        """Record a report."""
        simulation = self._simulation
        simulation.told.setdefault(report.rank, []).append(report.metrics["step"])
        simulation.trace.append((simulation.clock(), "report", report.rank, report.iteration, report.metrics["step"]))

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        """Record a commit."""
        self._simulation.note_commit(checkpoint.number)
        self._simulation.trace.append((self._simulation.clock(), "commit", checkpoint.number))

    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        """Record a failure."""
        self._simulation.failures.append(failure)
        self._simulation.trace.append((self._simulation.clock(), "failure", failure.kind.value, failure.rank, retrying))


class WatchedPolicy:
    """Checks what the failure policy receives."""

    def __init__(self, simulation: Simulation, policy: FailurePolicy) -> None:
        self._simulation = simulation
        self._policy = policy

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """Decide as the other policy does."""
        require(list(history) == self._simulation.failures, "the policy receives all earlier failures")
        return self._policy.decide(failure, history)


@dataclass
class Simulation:
    """One simulated run, and everything that its checks need.

    Attributes:
        directory: the run directory.
        seed: the source of all random choices.
        scenario: the properties of the run.
        trace: everything that happened, with its virtual time.
        arrived: the steps in the reports that have arrived in the current attempt, by rank.
        told: the steps in the reports that callbacks have received in the current attempt, by rank.
        commits: the numbers of the committed checkpoints, in the order of the commits.
        contributors: the ranks that are known to contribute in the current attempt, with the number of the first
            checkpoint that needs their files.
        stored_at: the time at which the last files arrived, by the number of the checkpoint.
        trained_at: the time at which the last rank entered the train function.
        was_refused: True if the storage has refused a commit of the current attempt.
        failures: the failures that callbacks have received.
        group: the current group, or the last one.
        launched: the number of groups that were started.
        stopped: the number of groups that were stopped.
        refused_commits: the number of commits that the storage will refuse.
        highest_number: the highest report number that has arrived.
        reported_checkpoints: the numbers of the reports with a checkpoint in the current attempt, or in the last one.
        group_class: the class of the groups.
        checkpoints: the committed checkpoints.
    """

    directory: Path
    seed: random.Random
    scenario: Scenario
    clock: Clock = field(default_factory=Clock)
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    arrived: dict[int, list[int]] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    commits: list[int] = field(default_factory=list)
    contributors: dict[int, int] = field(default_factory=dict)
    stored_at: dict[int, float] = field(default_factory=dict)
    trained_at: float = 0.0
    was_refused: bool = False
    failures: list[Any] = field(default_factory=list)
    group: SimulatedGroup | None = None
    launched: int = 0
    stopped: int = 0
    refused_commits: int = 0
    highest_number: int = 0
    reported_checkpoints: set[int] = field(default_factory=set)
    group_class: type[SimulatedGroup] = SimulatedGroup
    checkpoints: CheckpointManager | None = None

    @property
    def latest(self) -> CommittedCheckpoint | None:
        """The checkpoint from which an attempt would resume."""
        return None if self.checkpoints is None else self.checkpoints.latest

    def note_start(self) -> None:
        """Record the checkpoint with which an attempt starts."""
        newest = self.latest
        ranks = range(self.scenario.world_size)
        self.contributors = {rank: 0 for rank in ranks if newest is not None and newest.has_files_of(rank)}
        self.stored_at, self.was_refused = {}, False

    def note_arrival(self, group: SimulatedGroup, event: Event) -> None:
        """Record an event that the driver receives."""
        if isinstance(event, PhaseEntered) and event.state is RankState.TRAINING:
            self.trained_at = self.clock()
        if isinstance(event, FilesAnnounced):
            self.contributors.setdefault(event.rank, event.number)
        if isinstance(event, Uploaded):
            self.stored_at[event.number] = self.clock()
        if isinstance(event, Returned):
            self.contributors.pop(event.rank, None)
        if isinstance(event, Reported):
            self.highest_number = max(self.highest_number, event.number)
            if event.directory is not None:
                self.reported_checkpoints.add(event.number)
                if event.files is not None:
                    self.stored_at[event.number] = self.clock()
            self.arrived.setdefault(event.rank, []).append(event.metrics["step"])

    def note_commit(self, number: int) -> None:
        """Record a commit, and check that it came in time."""
        self.commits.append(number)
        if not self.scenario.uneven and not self.scenario.combines:
            ready_at = max(self.stored_at[number], self.trained_at)
            in_time = self.clock() <= ready_at + SHORT_WAIT_S + 1e-3
            require(in_time, "a checkpoint is committed within a second after its last files")

    def check(self) -> None:
        """Check what holds after every event."""
        for rank, steps in self.told.items():
            require(steps == self.arrived[rank][: len(steps)], f"reports of rank {rank} arrive once and in order")
        # A checkpoint that could not be withdrawn remains in the manifest, but this driver does not resume from it.
        committed = [] if self.checkpoints is None else self.checkpoints.committed
        for entry in [self.latest] if self.was_refused else committed:
            if entry is not None and entry.number in self.stored_at:
                missing = [
                    rank
                    for rank, first in self.contributors.items()
                    if first <= entry.number and not entry.has_files_of(rank)
                ]
                require(not missing, f"the committed checkpoint {entry.number} has the files of {missing}")
                declared = range(self.scenario.savers if self.scenario.declares else 0)
                require(all(map(entry.has_files_of, declared)), "a checkpoint has the files of all declared ranks")

    def check_attempt(self, group: SimulatedGroup) -> None:
        """Check what holds after an attempt, and forget its reports."""
        self.check()
        require(self.told == self.arrived, "every report that arrives is delivered")
        self.told, self.arrived = {}, {}

    def before_commit(self) -> None:
        """Refuse a commit, as a storage that cannot be written would."""
        if self.refused_commits:
            self.refused_commits -= 1
            self.was_refused = True
            raise StorageError("the storage refuses the commit")

    def run(self, patch: pytest.MonkeyPatch, failure_config: FailureConfig) -> Succeeded | RunFailed:
        """Run the controller to its end on the virtual clock, and check the outcome."""
        patch.setattr(time, "monotonic", self.clock)
        patch.setattr(time, "time", self.clock)
        patch.setattr("drivetrain._driver.delivery.ReportMatcher", partial(ReportMatcher, clock=self.clock))
        pending = partial(PendingCheckpoints, clock=self.clock)
        patch.setattr("drivetrain._driver.commits.PendingCheckpoints", pending)
        instant = SimpleNamespace(poll=lambda: InstantPoll(self.clock), POLLIN=select.POLLIN)
        patch.setattr("drivetrain._driver.controller.select", instant)
        storage = local_storage(self.directory)
        size = self.scenario.world_size
        run = Run(
            name="run",
            id="01234567",
            path=self.directory,
            location=str(self.directory),
            storage=storage,
            scaling_config=ScalingConfig(num_workers=size),
            run_config=RunConfig(
                name="run",
                storage_path=self.directory.parent,
                failure_config=failure_config,
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                start_timeout_s=START_TIMEOUT_S,
                hang_timeout_s=HANG_TIMEOUT_S,
                log_to_file=False,
            ),
            train_loop_config=None,
            console=Console(),
        )
        interrupts = Interrupts()
        checkpoints = CheckpointManager(storage, run.run_config.checkpoint_config, check_lock=self.before_commit)
        self.checkpoints = checkpoints
        services = RunServices(
            run=run,
            backend=NoBackend(),
            checkpoints=checkpoints,
            callbacks=Callbacks([Recorder(self)], run),
            interrupts=interrupts,
        )
        tasks = TaskFactory(
            services,
            function=b"",
            split=lambda workers, checkpoint: [{} for _ in workers],
            metadata={},
            all_values=True,
        )
        try:
            policy = WatchedPolicy(self, make_policy(failure_config))
            outcome = Controller(services, SimulatedRuntime(self), tasks, policy).run()
        finally:
            checkpoints.close()
            interrupts.close()
        self._check_outcome(outcome, checkpoints)
        return outcome

    def _check_outcome(self, outcome: Succeeded | RunFailed, checkpoints: CheckpointManager) -> None:
        require(self.stopped == self.launched, "every group is stopped")
        stored = read_manifest(local_storage(self.directory))
        require(stored == checkpoints.committed, "the manifest contains the committed checkpoints")
        require(stored == sorted(stored, key=lambda entry: entry.number), "the manifest is in order")
        for entry in checkpoints.committed:
            checkpoints.checkpoint(entry).verify()
        if isinstance(outcome, Succeeded):
            all_steps = all(value >= self.scenario.steps_of(rank) for rank, value in enumerate(outcome.return_values))
            require(all_steps, "every rank takes all steps")
            require(self.reported_checkpoints <= set(self.commits), "every checkpoint of a successful attempt is kept")
        else:
            require([*outcome.history, outcome.failure] == self.failures, "each failed attempt has one root cause")


def _saved_step(task: TrainTask) -> int:
    """Return the step that the checkpoint contains from which a task resumes; 0 without a checkpoint."""
    if task.checkpoint is None:
        return 0
    return min(int(file.read_text()) for file in Path(task.checkpoint.path).glob("rank_*"))
