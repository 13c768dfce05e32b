"""A worker group without processes that implements the complete protocol of a group."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from drivetrain import RunCancelledError
from drivetrain._base.interrupts import Interrupts
from drivetrain._wire.commands import CountSteps, Renumber, RunningTaskCommand, StopAfter
from drivetrain._wire.events import (
    Event,
    Exited,
    Failed,
    PhaseEntered,
    RankState,
    Renumbered,
    Reported,
    ReportNumber,
    Returned,
    StepsCounted,
)
from drivetrain._wire.task import TrainTask
from drivetrain.plugin import WorkerInfo

TRAINING = RankState.TRAINING
OUTSIDE = "outside"
Action = Callable[[], object]


class ScriptedRank:
    """A rank: the events that it will send, and its responses to commands. Each report is a step.

    Args:
        rank: the rank.
        script: the events. Report numbers continue after the number given by the rank's task.
        saves: whether it saves and returns on request.
        saving: the events that it sends before it returns.
        in_flight: whether its next report is already in flight when it is first renumbered.
    """

    def __init__(
        self,
        rank: int,
        script: Iterable[Event],
        *,
        saves: bool = True,
        saving: Sequence[Event] = (),
        in_flight: bool = False,
    ) -> None:
        self.rank = rank
        self.events: deque[Event] = deque(script)
        self.last_report = ReportNumber(0, 0)
        self.steps = 0
        self._saves = saves
        self._saving = saving
        self._in_flight = in_flight
        self._waiting: deque[Event] = deque()
        self._has_ended = False

    def next_event(self) -> Event:
        event = self._number(self.events.popleft())
        self._has_ended |= isinstance(event, (Returned, Failed, Exited))
        return event

    def _number(self, event: Event) -> Event:
        if not isinstance(event, Reported) or event.number:
            return event
        self.steps += 1
        number, iteration = self.last_report
        self.last_report = ReportNumber(number + 1, iteration + (not event.quiet))
        return event._replace(**self.last_report._asdict())

    def interject(self, event: Event) -> None:
        """Make an event the next one, unless the rank has exited."""
        if not self._has_ended:
            self.events.appendleft(event)

    def perform(self, command: RunningTaskCommand) -> None:
        if self._has_ended:
            return
        match command:
            case CountSteps():
                if any(isinstance(event, Reported) for event in self.events):  # the next step blocks
                    self._waiting, self.events = self.events, deque()
                self.events.appendleft(StepsCounted(self.rank, self.steps))
            case StopAfter():
                assert command.step > self.steps
                if self._saves and self._waiting:
                    self._waiting = deque([*self._saving, Returned(self.rank, None, True)])
                self.events += self._waiting
            case Renumber():
                answers: list[Event] = [Renumbered(self.rank)]
                if self._in_flight and self.events and isinstance(self.events[0], Reported):
                    answers.insert(0, self._number(self.events.popleft()))
                self._in_flight = False
                self.last_report = command.last_report
                self.events.extendleft(reversed(answers))


class ScriptedGroup:
    """Workers with known events. Each :meth:`pump` delivers one of them.

    Args:
        ranks: the ranks.
        order: the rank that sends each event, or :data:`OUTSIDE` for the next action; afterwards round-robin.
        actions: events outside the ranks, such as a signal to the driver.
        interrupts: handled before each event.
        nodes: the node of each rank.
    """

    def __init__(
        self,
        ranks: Sequence[ScriptedRank],
        order: Iterable[int | str] = (),
        actions: Iterable[Action] = (),
        interrupts: Interrupts | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        self.ranks = list(ranks)
        self.workers: tuple[WorkerInfo, ...] = tuple(
            WorkerInfo(rank=rank, local_rank=rank, node_rank=0, node_id=node, hostname=node, ip="127.0.0.1", pid=1)
            for rank, node in enumerate(nodes or ["here"] * len(ranks))
        )
        self._order = deque(order)
        self._actions = deque(actions)
        self._interrupts = interrupts
        self.sent: list[tuple[tuple[int, ...], RunningTaskCommand]] = []
        self.tasks: list[TrainTask] = []
        self.delivered: list[Event] = []
        self.replacements: dict[int, list[Event]] = {}
        self._replaced: dict[int, list[Event]] = {}

    def act(self, action: Action) -> None:
        """Adds an action."""
        self._actions.append(action)

    def run(self, fn: Callable[..., Any], /, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        return [fn(*args) for _ in (self.workers if ranks is None else ranks)]

    def train(self, tasks: Sequence[TrainTask]) -> None:
        self.tasks += tasks
        for task in tasks:
            self.begin(task.context.get_world_rank(), task.last_report)

    def begin(self, rank: int, last_report: ReportNumber) -> None:
        """Start a rank whose reports continue after a number."""
        self.ranks[rank].last_report = last_report
        self.ranks[rank].events += self._replaced.pop(rank, [])

    def send(self, ranks: Sequence[int], command: RunningTaskCommand) -> None:
        self.sent.append((tuple(ranks), command))
        for rank in ranks:
            self.ranks[rank].perform(command)

    def replace(self, ranks: Sequence[int]) -> None:
        workers = list(self.workers)
        for rank in ranks:
            workers[rank] = replace(workers[rank], pid=workers[rank].pid + 1)
            self.ranks[rank] = ScriptedRank(rank, [])
            self._replaced[rank] = self.replacements.pop(rank)
        self.workers = tuple(workers)

    @contextlib.contextmanager
    def woken_by(self, future: Future[Any]) -> Iterator[None]:
        yield

    def pump(self, deliver: Callable[[Event], bool], timeout_s: float | None) -> None:
        if self._interrupts is not None:
            self._interrupts.act()
        source = self._next_source()
        if source is None:
            assert timeout_s is not None, "no event is left, so this would wait forever"
        elif source == OUTSIDE:
            self._actions.popleft()()
        else:
            event = self.ranks[int(source)].next_event()
            self.delivered.append(event)
            deliver(event)

    def _next_source(self) -> int | str | None:
        def is_ready(source: int | str) -> bool:
            return bool(self._actions if source == OUTSIDE else self.ranks[int(source)].events)

        while self._order:
            if is_ready(source := self._order.popleft()):
                return source
        return next((source for source in [*range(len(self.ranks)), OUTSIDE] if is_ready(source)), None)

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        return {}

    def park(self) -> bool:
        return False

    def reuse(self, spec: Any) -> bool:
        return False


def report(rank: int, *, checkpoint: str | None = None, **metrics: float) -> Reported:
    """Return a report; the rank fills in its numbers."""
    return Reported(rank, 0, 0, 0.0, metrics, None if checkpoint is None else {}, None, checkpoint)


def start(rank: int) -> PhaseEntered:
    """Return the event of a rank that enters the train function."""
    return PhaseEntered(rank, TRAINING, 0.0)


def cancel(interrupts: Interrupts) -> None:
    """Cancel the run as ``RunHandle.cancel()`` does."""
    interrupts.request("the run was cancelled", RunCancelledError("the run was cancelled"))
