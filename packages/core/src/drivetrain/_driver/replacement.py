"""Replaces lost ranks while the others keep their processes, for backends that allow it."""

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
"""A rank answers from a separate thread, so it takes longer only if its process is stopped."""


class Replacement:
    """Waits until the ranks that are left can continue with new ones. Any other event makes it fail.

    Args:
        group: of the attempt.
        ranks: of the attempt.
        machine: in the state ``REPLACING``.
        handle: takes an event.
    """

    def __init__(self, group: Group, ranks: Ranks, machine: StateMachine, handle: Callable[[Event], bool]) -> None:
        self._group = group
        self._ranks = ranks
        self._machine = machine
        self._handle = handle
        self._awaited: set[int] = set()

    def await_rejoin(self, future: Future[Any], timeout_s: float) -> bool:
        """Waits until the other ranks wait for the new ones; returns False if one of them does not."""
        with self._group.woken_by(future):
            self._pump_until(future.done, timeout_s)
        return future.done() and not future.cancelled() and self._is_possible

    def renumber(self) -> ReportNumber | None:
        """Makes the next report of each rank follow the same number; returns None if a rank fails.

        Returns:
            An unused number: a lost rank may already have stored files under the latest one.
        """
        last_report = self._ranks.last_report
        while last_report.number <= self._ranks.last_report.number:  # answers come after earlier reports
            latest = self._ranks.last_report
            last_report = ReportNumber(latest.number + 1, latest.iteration)
            self._awaited = set(self._ranks.active)
            self._group.send(sorted(self._ranks.active), Renumber(last_report))
            self._pump_until(lambda: not self._awaited, _RENUMBER_WAIT_S)
            if self._awaited or not self._is_possible:
                return None
        return last_report

    def on_renumbered(self, rank: int) -> None:
        """A rank has answered."""
        self._awaited.discard(rank)

    @property
    def _is_possible(self) -> bool:
        return self._machine.state is AttemptState.REPLACING and bool(self._ranks.replaceable)

    def _pump_until(self, met: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not met() and self._is_possible and (remaining := deadline - time.monotonic()) > 0:
            self._group.pump(self._handle, remaining)
