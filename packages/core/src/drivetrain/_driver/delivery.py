"""Processes reports: passes metrics to the callbacks, combines values and commits checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain._base.failure import one_line
from drivetrain._base.metrics import AUTOMATIC, find_metric, writable
from drivetrain._driver.ranks import Rank, Ranks, clock_of
from drivetrain._driver.reports import MatchedReport, ReportMatcher, combine
from drivetrain._driver.requests import RankRequests
from drivetrain._driver.services import RunServices
from drivetrain._driver.states import StateMachine, Trigger
from drivetrain._hooks.callback import Report
from drivetrain._storage.duplicates import describe_ranks
from drivetrain._wire.commands import RunningTaskCommand
from drivetrain._wire.events import CommitOverdue, FilesClaimed, Reported, ReportNumber, Uploaded
from drivetrain.errors import CallbackError, CheckpointError, StorageError

if TYPE_CHECKING:
    from drivetrain._storage.filesystem import StoredFile

__all__ = ["Delivery"]

_SHOWN_NAMES = 5


class Delivery:
    """Delivers the reports of one attempt to the callbacks, and commits their checkpoints.

    Args:
        services: the services of the run.
        ranks: the ranks of the attempt.
        machine: the state machine, which receives ``Trigger.STOP_CONDITION_MET``.
        last_number: the report number from which the reports of the attempt continue counting.
        send: sends a command to ranks.

    Attributes:
        last_number: the highest report number so far.
        metrics: the last metrics that rank 0 reported; None before its first report.
    """

    def __init__(
        self,
        services: RunServices,
        ranks: Ranks,
        machine: StateMachine,
        last_number: int,
        send: Callable[[Sequence[int], RunningTaskCommand], None],
    ) -> None:
        self._services = services
        self._config = services.run.run_config
        self._ranks = ranks
        self._machine = machine
        self._matcher = ReportMatcher(len(ranks), last_number)
        self._waiting: deque[Reported] = deque()
        self._combined: dict[int, dict[str, float]] = {}
        self._uploading: dict[int, MatchedReport] = {}
        self._requests = RankRequests(send)
        self._stop_number: int | None = None
        self.last_number = last_number
        self.metrics: dict[str, Any] | None = None

    @property
    def is_uploading(self) -> bool:
        """True if checkpoints wait for background uploads."""
        return bool(self._uploading)

    @property
    def is_complete(self) -> bool:
        """True if all checkpoints that were reported before the stop condition was met are complete."""
        number = self._stop_number
        return not self._uploading and (number is None or not self._matcher.holds_up_to(number))

    def on_report(self, event: Reported) -> bool:
        """Process a report; return True if a checkpoint was committed."""
        rank = self._ranks[event.rank]
        self._fill_in(event, rank)
        rank.number, rank.iteration = event.number, event.iteration
        self.last_number = max(self.last_number, event.number)
        if event.awaited:
            self._requests.await_commit(event.number, event.rank)
        settled = self._matcher.add(event)
        if event.rank == 0 and not event.quiet and (event.reduce or self._waiting):
            self._waiting.append(event)
        elif not event.quiet:
            self._deliver(event)
        return self._complete(settled)

    def on_upload(self, event: Uploaded) -> bool:
        """Process the end of a background upload; return True if a checkpoint was committed."""
        matched = self._matcher.held_report(event.number) or self._uploading.get(event.number)
        if matched is None:  # restart() has discarded the report
            return False
        matched.files[event.rank] = event.files
        matched.uploading.discard(event.rank)
        if matched.uploading or event.number not in self._uploading:
            return False
        self._commit(self._uploading.pop(event.number))
        return True

    def respond(self, event: CommitOverdue | FilesClaimed) -> None:
        """Respond to a request of a rank that reports a checkpoint."""
        if isinstance(event, FilesClaimed):
            self._requests.claim(event)
        else:
            self._requests.explain(event.number, event.rank, self._missing(event.number))

    def describe_uncommitted(self) -> str:
        """Return a message about the checkpoints that were reported and are not committed; empty if there are none."""
        held = [*self._matcher.held_checkpoints(), *self._uploading.values()]
        if not held:
            return ""
        names = [name for matched in held for name in sorted(set(matched.directories.values()))]
        missing = sorted({rank for matched in held for rank in self._missing(matched.number)})
        shown = ", ".join(names[:_SHOWN_NAMES]) + (
            f" and {len(names) - _SHOWN_NAMES} more" * (len(names) > _SHOWN_NAMES)
        )
        return (
            f"[DT-424] not committed, and lost: {shown}. They waited for {describe_ranks(missing)} to report as often, "
            "or to upload files. To wait for the commit, call report(..., wait=True)"
        )

    def _missing(self, number: int) -> list[int]:
        """Return the ranks that the checkpoint with this report number waits for."""
        matched = self._matcher.held_report(number) or self._uploading.get(number)
        uploading = matched.uploading if matched is not None else set()
        behind = self._matcher.ranks_behind(number) if number not in self._uploading else []
        return sorted({*uploading, *behind})

    def finish(self, rank: int) -> bool:
        """Record that a rank will not report again; return True if a checkpoint was committed."""
        return self._complete(self._matcher.finish(rank))

    def restart(self, last_report: ReportNumber, lost: Sequence[int]) -> None:
        """Discard the reports and uploads that will not be completed because ranks were lost.

        Args:
            last_report: the report number and the iteration from which all ranks continue counting.
            lost: the lost ranks. A checkpoint that waits for an upload of one of them is discarded.
        """
        self.flush()
        self._matcher.restart(last_report.number)
        self._uploading = {n: held for n, held in self._uploading.items() if held.uploading.isdisjoint(lost)}
        self._combined.clear()

    def flush(self) -> None:
        """Deliver the reports that wait for combined values, without the values that are still unknown."""
        while self._waiting:
            self._deliver_waiting()

    def _fill_in(self, event: Reported, rank: Rank) -> None:
        """Add the automatic metrics to a report."""
        metrics = event.metrics
        metrics.setdefault("_timestamp", int(event.time))
        if not event.quiet:
            metrics.setdefault("_time_this_iter_s", clock_of(event) - rank.clock_at)
        metrics.setdefault("_training_iteration", event.iteration)
        if event.quiet:
            return
        rank.reported_at, rank.clock_at = event.time, clock_of(event)
        if self._config.detailed_metrics:
            moment = datetime.datetime.fromtimestamp(event.time)
            metrics.setdefault("_date", moment.strftime("%Y-%m-%d_%H-%M-%S"))
            metrics.setdefault("_hostname", rank.worker.hostname)
            metrics.setdefault("_node_ip", rank.worker.ip)
            metrics.setdefault("_pid", rank.worker.pid)
            metrics.setdefault("_time_total_s", clock_of(event) - rank.trained_from)

    def _deliver(self, event: Reported) -> None:
        if event.rank == 0:
            self.metrics = event.metrics
        self._services.callbacks.report(Report(event.rank, event.iteration, event.metrics, event.directory))
        condition = self._config.stop
        if event.rank == 0 and condition is not None and self._stop_number is None and self._is_met(event):
            self._stop_number = event.number
            self._machine.apply(Trigger.STOP_CONDITION_MET)

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

    def _complete(self, settled: list[MatchedReport]) -> bool:
        """Combine the values of completed reports, and commit their checkpoints; return True after a commit."""
        committed = False
        for matched in settled:
            if matched.reduce:
                self._combined[matched.number] = combine(matched.metrics, matched.reduce)
            while self._waiting and (not self._waiting[0].reduce or self._waiting[0].number in self._combined):
                self._deliver_waiting()
            if matched.uploading:
                self._uploading[matched.number] = matched
            elif matched.directories:
                committed |= self._commit(matched)
        return committed

    def _deliver_waiting(self) -> None:
        event = self._waiting.popleft()
        event.metrics.update(self._combined.pop(event.number, {}))
        self._deliver(event)

    def _commit(self, matched: MatchedReport) -> bool:
        """Commit the checkpoint of a report; return False if a lost process has taken files of it with it."""
        names = sorted(set(matched.directories.values()))
        if len(names) > 1:
            raise CheckpointError(
                f"[DT-411] checkpoint_dir_name: expected the same name on all ranks, got {', '.join(names)}"
            )
        files = self._files_of_shared(matched) if matched.shared else matched.files
        if files is None:
            return False
        metrics = dict(matched.metrics[min(matched.metrics)])
        metrics.update(combine(matched.metrics, matched.reduce))
        try:
            entry = self._services.checkpoints.commit(
                index=matched.number,
                iteration=matched.iteration,
                files=files,
                metrics=writable(metrics),
                name=names[0],
            )
        except StorageError:  # this ends the attempt, but the waiting reports have arrived
            with contextlib.suppress(CallbackError):  # the storage error remains the root cause
                self.flush()
            raise
        self._requests.note_commit(matched.number, names[0])
        self._services.callbacks.call("on_checkpoint", entry)
        return True

    def _files_of_shared(self, matched: MatchedReport) -> Mapping[int, Mapping[str, StoredFile]] | None:
        """Return the uploaded files of a checkpoint that all ranks have saved together.

        In a local run directory, no rank has uploaded files. Otherwise, one rank of each node has uploaded all files of
        its node, and only the files of these ranks are returned. None means that a process of a node was lost after it
        had reported the checkpoint, and before the last process of the node uploaded it. The event that the process has
        exited follows.

        Raises:
            CheckpointError: a rank has not reported the checkpoint, or no rank has written a file.
        """
        ranks = range(len(self._ranks))
        if missing := [rank for rank in ranks if rank not in matched.directories]:
            raise CheckpointError(
                f"[DT-417] shared_checkpoint(): expected every rank to report {min(matched.directories.values())}, got "
                f"no report from {', '.join(f'rank {rank}' for rank in missing)}. Make every rank save and report it"
            )
        storage, name = self._services.run.storage, min(matched.directories.values())
        if storage.is_local:
            if not storage.walk(name):
                raise CheckpointError(
                    "[DT-408] report(): expected files in the shared checkpoint's directory, got none from any rank in "
                    f"{storage.path(name)}. Save the checkpoint to its path before calling report()"
                )
            return matched.files
        uploaded = {rank: files for rank, files in matched.files.items() if files}
        nodes = {self._ranks[rank].worker.node_id for rank in ranks}
        if without := nodes - {self._ranks[rank].worker.node_id for rank in uploaded}:
            self._services.run.console.print(
                f"{name} is not committed, because no process of {', '.join(without)} has uploaded it",
                error=True,
            )
            return None
        return uploaded
