"""Replaces lost ranks while the other ranks keep their processes, for backends that support it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from drivetrain._driver.ranks import Ranks
from drivetrain._driver.states import AttemptState, StateMachine
from drivetrain._runtimes.base import Group
from drivetrain._wire.commands import Renumber
from drivetrain._wire.events import Event, ReportNumber

__all__ = ["Replacement"]

_RENUMBER_WAIT_S = 10.0
"""Seconds to wait for replies. Ranks reply on a separate thread, so only a stopped process takes longer."""


class Replacement:
    """Coordinates one replacement: waits until the remaining ranks can continue together with the new processes.

    The replacement fails if, in the meantime, another rank fails, is lost or returns, or the attempt is asked to end.

    Args:
        group: the group of the attempt.
        ranks: the ranks of the attempt.
        machine: the state machine, in the state ``REPLACING``.
        handle: processes one event; see ``Attempt.handle``.
    """

    def __init__(self, group: Group, ranks: Ranks, machine: StateMachine, handle: Callable[[Event], bool]) -> None:
        self._group = group
        self._ranks = ranks
        self._machine = machine
        self._handle = handle
        self._awaited: set[int] = set()

    def await_rejoin(self, future: Future[Any], timeout_s: float) -> bool:
        """Wait until all remaining ranks are ready for the new processes; return False if the replacement fails.

        Args:
            future: done when the remaining ranks are ready; see :meth:`drivetrain.plugin.Backend.rejoin`.
            timeout_s: the maximum wait in seconds.
        """
        with self._group.woken_by(future):
            self._pump_until(future.done, timeout_s)
        return future.done() and not future.cancelled() and self._is_possible

    def renumber(self) -> ReportNumber | None:
        """Make all remaining ranks continue counting from the same report number.

        Returns:
            The report number and the iteration from which to continue counting; None if the replacement fails. One
            number is skipped, because a lost rank may already have stored files for its next report.
        """
        last_report = self._ranks.last_report
        while last_report.number <= self._ranks.last_report.number:  # new reports can precede the replies
            latest = self._ranks.last_report
            last_report = ReportNumber(latest.number + 1, latest.iteration)
            self._awaited = set(self._ranks.active)
            self._group.send(sorted(self._ranks.active), Renumber(last_report))
            self._pump_until(lambda: not self._awaited, _RENUMBER_WAIT_S)
            if self._awaited or not self._is_possible:
                return None
        return last_report

    def on_renumbered(self, rank: int) -> None:
        """Record the reply of a rank."""
        self._awaited.discard(rank)

    @property
    def _is_possible(self) -> bool:
        return self._machine.state is AttemptState.REPLACING and bool(self._ranks.replaceable)

    def _pump_until(self, met: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not met() and self._is_possible and (remaining := deadline - time.monotonic()) > 0:
            self._group.pump(self._handle, remaining)
