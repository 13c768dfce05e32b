"""Delivers reports to the callbacks, with the values that are combined over the ranks."""

from __future__ import annotations

import datetime
import math
import time
from collections import deque
from typing import Any

from drivetrain._base.failure import one_line
from drivetrain._base.metrics import AUTOMATIC, find_metric
from drivetrain._driver.ranks import Rank, Ranks, clock_of
from drivetrain._driver.reports import MatchedReport, ReportMatcher, combine
from drivetrain._driver.services import RunServices
from drivetrain._driver.states import StateMachine, Trigger
from drivetrain._hooks.callback import Report
from drivetrain._wire.events import Reported, ReportNumber
from drivetrain.errors import CallbackError, RunInUseError, StorageError

__all__ = ["Delivery"]

_CHECK_S = 0.02
"""Seconds for which a check of the files is valid."""


class Delivery:
    """Delivers the reports of one attempt to the callbacks.

    Args:
        services: the services of the run.
        ranks: the ranks of the attempt.
        machine: the state machine, which receives ``Trigger.STOP_CONDITION_MET``.
        last_number: the report number from which the reports of the attempt continue counting.

    Attributes:
        last_number: the highest report number so far.
        stop_number: the number of the report that met the stop condition; None if none has met it.
        metrics: the last metrics that rank 0 reported; None before its first report.
    """

    def __init__(self, services: RunServices, ranks: Ranks, machine: StateMachine, last_number: int) -> None:
        self._services = services
        self._config = services.run.run_config
        self._ranks = ranks
        self._machine = machine
        self._matcher = ReportMatcher(len(ranks), last_number)
        self._waiting: deque[Reported] = deque()
        self._combined: dict[int, dict[str, float]] = {}
        self._shares_files = services.run.storage.is_local  # otherwise, callbacks write to a directory of this driver
        self._checked_at = -math.inf
        self.last_number = last_number
        self.stop_number: int | None = None
        self.metrics: dict[str, Any] | None = None

    def waits_up_to(self, number: int) -> bool:
        """Return True if the report with this number or a smaller number waits for another rank."""
        return self._matcher.waits_up_to(number)

    def note(self, event: Reported) -> None:
        """Record the number of a report, and add the automatic metrics to it."""
        rank = self._ranks[event.rank]
        self._fill_in(event, rank)
        rank.number, rank.iteration = event.number, event.iteration
        self.last_number = max(self.last_number, event.number)

    def deliver(self, event: Reported) -> dict[int, dict[str, float]]:
        """Pass a report to the callbacks, now or as soon as its values are combined.

        Returns:
            The values that are combined now, by report number.
        """
        matched = self._matcher.add(event)
        if event.rank == 0 and not event.quiet and (event.reduce or self._waiting):
            self._waiting.append(event)
        elif not event.quiet:
            self._deliver(event)
        return self._combine(matched)

    def finish(self, rank: int) -> dict[int, dict[str, float]]:
        """Record that a rank will not report again. Return the values that are combined now, by report number."""
        return self._combine(self._matcher.finish(rank))

    def restart(self, last_report: ReportNumber) -> None:
        """Discard the reports that will not be completed because ranks were lost.

        Args:
            last_report: the report number and the iteration from which all ranks continue counting.
        """
        self.flush()
        self._matcher.restart(last_report.number)
        self._combined.clear()

    def flush(self) -> None:
        """Deliver the reports that wait for combined values, without the values that are still unknown."""
        while self._waiting:
            self._deliver_waiting()

    def _fill_in(self, event: Reported, rank: Rank) -> None:
        """Add the automatic metrics to a report."""
        metrics, clock = event.metrics, clock_of(event)
        metrics.setdefault("_timestamp", int(event.time))
        if not event.quiet:
            metrics.setdefault("_time_this_iter_s", clock - rank.clock_at)
        metrics.setdefault("_training_iteration", event.iteration)
        if event.quiet:
            return
        rank.reported_at, rank.clock_at = event.time, clock
        if self._config.detailed_metrics:
            moment = datetime.datetime.fromtimestamp(event.time)
            metrics.setdefault("_date", moment.strftime("%Y-%m-%d_%H-%M-%S"))
            metrics.setdefault("_hostname", rank.worker.hostname)
            metrics.setdefault("_node_ip", rank.worker.ip)
            metrics.setdefault("_pid", rank.worker.pid)
            metrics.setdefault("_time_total_s", clock - rank.trained_from)

    def _deliver(self, event: Reported) -> None:
        self._require_files()
        if event.rank == 0:
            self.metrics = event.metrics
        self._services.callbacks.report(Report(event.rank, event.iteration, event.metrics, event.directory))
        condition = self._config.stop
        if event.rank == 0 and condition is not None and self.stop_number is None and self._is_met(event):
            self.stop_number = event.number
            self._machine.apply(Trigger.STOP_CONDITION_MET)

    def _require_files(self) -> None:
        """Check that the files to which callbacks write are still those of this driver, which may have been suspended.

        Raises:
            RunInUseError: another driver has taken the run over.
        """
        if not self._shares_files:
            return
        now = time.time()  # it also runs while the process or the machine is suspended
        if abs(now - self._checked_at) < _CHECK_S:  # to check at every report would take a tenth of the driver's time
            return
        self._checked_at = now
        try:
            self._services.checkpoints.check_lock()
        except RunInUseError:
            raise
        except StorageError:  # the storage does not respond; the next commit will say so
            return

    def _is_met(self, event: Reported) -> bool:
        condition = self._config.stop
        total = {"_time_total_s": clock_of(event) - self._ranks[event.rank].trained_from, **event.metrics}
        # Functions written for Ray Train look the automatic metrics up without the underscore.
        metrics = {**{name.removeprefix("_"): total[name] for name in AUTOMATIC if name in total}, **total}
        try:
            if callable(condition):
                return bool(condition(self._services.run.id, metrics))
            return any(find_metric(metrics, key, -math.inf) >= bound for key, bound in (condition or {}).items())
        except Exception as error:  # raised by a user's function, or by comparing a metric that is not a number
            raise CallbackError(f"[DT-605] RunConfig(stop=...) raised {one_line(error)}") from error

    def _combine(self, matched: list[MatchedReport]) -> dict[int, dict[str, float]]:
        """Combine the values of matched reports, and deliver the reports that waited for them."""
        if not matched:
            return {}
        combined = {reports.number: combine(reports.metrics, reports.reduce) for reports in matched}
        for number, values in combined.items():
            self._combined[number] = values
            while self._waiting and (not self._waiting[0].reduce or self._waiting[0].number in self._combined):
                self._deliver_waiting()
        return combined

    def _deliver_waiting(self) -> None:
        event = self._waiting.popleft()
        event.metrics.update(self._combined.pop(event.number, {}))
        self._deliver(event)
