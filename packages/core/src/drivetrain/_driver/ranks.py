"""The state of each rank of an attempt, as seen by the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain._hooks.context import WorkerInfo
from drivetrain._wire.events import Exited, Failed, PhaseEntered, RankEvent, RankState, Reported, ReportNumber, Returned

__all__ = ["Rank", "Ranks", "clock_of", "next_rank_state"]

_ENDED = (RankState.FINISHED, RankState.FAILED, RankState.LOST)
_RANK_TRANSITIONS: Mapping[type, RankState] = {
    Returned: RankState.FINISHED,
    Failed: RankState.FAILED,
    Exited: RankState.LOST,
}


def next_rank_state(state: RankState, event: RankEvent) -> RankState:
    """Return the state of a rank after an event. A rank that has finished, failed or been lost keeps its state."""
    if state in _ENDED:
        return state
    if isinstance(event, PhaseEntered):
        return event.state
    return _RANK_TRANSITIONS.get(type(event), state)


@dataclass(slots=True)
class Rank:
    """The driver's record of one rank.

    Attributes:
        worker: the process of the rank.
        number: the number of the rank's last report; before its first report, the number from which it counts.
        iteration: the iteration of the rank's last report; before its first report, the iteration from which it counts.
        state: the current state of the rank.
        lost_in: the rank's state when its process was lost; None if the process was not lost.
        reported_at: Unix time in seconds of the rank's last report, or of the start of its train function.
        clock_at: the time of the same event, in seconds of a clock that is never set.
        trained_from: the start of the rank's train function, by the same clock.
        received_sigterm: True if the rank's process received SIGTERM.
        return_value: the return value of the rank's train function.
    """

    worker: WorkerInfo
    number: int
    iteration: int
    state: RankState = RankState.WAITING
    lost_in: RankState | None = None
    reported_at: float = 0.0
    clock_at: float = 0.0
    trained_from: float = 0.0
    received_sigterm: bool = False
    return_value: Any = None


def clock_of(event: PhaseEntered | Reported) -> float:
    """Return the time of an event for computing durations, which a change of the system's clock does not affect."""
    return event.time if event.clock is None else event.clock


class Ranks(list[Rank]):
    """The ranks of one attempt.

    Args:
        workers: the processes of the ranks.
        last_report: the report number and the iteration from which the ranks continue counting.
        backend: the name of the backend, for :meth:`describe`.

    Attributes:
        active: the ranks that have not returned, failed or been lost.
        starting: the active ranks that have not reached the train function.
    """

    def __init__(self, workers: Sequence[WorkerInfo], last_report: ReportNumber, backend: str) -> None:
        super().__init__(Rank(worker, *last_report) for worker in workers)
        self._initial_number = last_report.number
        self._backend = backend
        self.active = set(range(len(workers)))
        self.starting = set(self.active)

    def apply(self, event: RankEvent) -> bool:
        """Update the state of the event's rank; return False if the rank had already ended."""
        number = event.rank
        if number not in self.active:
            return False
        rank = self[number]
        before, rank.state = rank.state, next_rank_state(rank.state, event)
        if isinstance(event, PhaseEntered) and event.state is RankState.TRAINING:
            self.starting.discard(number)
            rank.reported_at = event.time
            rank.clock_at = rank.trained_from = clock_of(event)
        elif rank.state in _ENDED:
            self.active.discard(number)
            self.starting.discard(number)
            rank.lost_in = before if rank.state is RankState.LOST else None
        return True

    def reports(self, rank: int) -> int:
        """Return the number of reports that a rank has made in this attempt."""
        return self[rank].number - self._initial_number

    def describe(self, rank: int) -> str:
        """Describe for messages what a rank is doing, or what it was doing when it was lost."""
        record = self[rank]
        return self.describe_state(record.lost_in or record.state)

    def describe_state(self, state: RankState) -> str:
        """Describe for messages what a rank in the given state is doing."""
        return state.describe(self._backend)

    def in_state(self, *states: RankState) -> list[int]:
        """Return the ranks in any of the given states."""
        return [number for number, rank in enumerate(self) if rank.state in states]

    @property
    def replaceable(self) -> list[int]:
        """The lost ranks, if new processes can replace them while the other ranks continue; otherwise empty.

        This requires that all ranks were in the train function, and that at least one of them still is.
        """
        states = {rank.lost_in or rank.state for rank in self}
        return self.in_state(RankState.LOST) if self.active and states == {RankState.TRAINING} else []

    @property
    def last_report(self) -> ReportNumber:
        """The highest report number and the highest iteration among all ranks."""
        return ReportNumber(max(rank.number for rank in self), max(rank.iteration for rank in self))

    def replace(self, lost: Sequence[int], workers: Sequence[WorkerInfo], last_report: ReportNumber) -> None:
        """Record the new processes of lost ranks, and the report number from which all ranks continue counting."""
        for rank, worker in zip(self, workers, strict=True):
            rank.worker = worker
            rank.number, rank.iteration = last_report
        for number in lost:
            self[number] = Rank(workers[number], *last_report)
            self.active.add(number)
            self.starting.add(number)
