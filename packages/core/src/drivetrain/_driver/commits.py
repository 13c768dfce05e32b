"""Commits the checkpoints that the ranks of an attempt report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain._base.metrics import writable
from drivetrain._driver.pending import PendingCheckpoint, PendingCheckpoints
from drivetrain._driver.ranks import Ranks
from drivetrain._driver.reports import combine
from drivetrain._driver.requests import RankRequests
from drivetrain._driver.services import RunServices
from drivetrain._storage.duplicates import describe_ranks
from drivetrain._wire.commands import RunningTaskCommand
from drivetrain._wire.events import CommitOverdue, FilesAnnounced, FilesClaimed, Reported, Uploaded
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain._storage.filesystem import StoredFile

__all__ = ["Commits"]

_WARNING_S = 5.0
"""The age in seconds at which a checkpoint that is not committed is worth a warning."""

_WARNING_PAUSE_S = 60.0
"""The minimum number of seconds between two warnings."""

_SHOWN_NAMES = 5


class Commits:
    """Commits the checkpoints of one attempt, once all ranks that contribute to them have stored their files.

    Args:
        services: the services of the run.
        ranks: the ranks of the attempt.
        last_number: the report number from which the reports of the attempt continue counting.
        send: sends a command to ranks.
    """

    def __init__(
        self,
        services: RunServices,
        ranks: Ranks,
        last_number: int,
        send: Callable[[Sequence[int], RunningTaskCommand], None],
    ) -> None:
        self._services = services
        self._ranks = ranks
        self._pending = PendingCheckpoints(len(ranks), last_number, services.checkpoints.committed)
        self._requests = RankRequests(send)
        self._young: deque[PendingCheckpoint] = deque()  # those that no warning has named
        self._no_warning_before = 0.0
        self._has_warned_of_late_files = False

    @property
    def is_uploading(self) -> bool:
        """True if checkpoints wait for files that are being stored."""
        return any(pending.storing for pending in self._pending)

    def waits_up_to(self, number: int) -> bool:
        """Return True if the checkpoint of the report with this number or a smaller number is not committed."""
        return any(pending.number <= number for pending in self._pending)

    def announce(self, event: FilesAnnounced) -> None:
        """Record that a rank is about to store files. Withdraw the checkpoints that are incomplete without them."""
        incomplete = self._pending.announce(event)
        if not incomplete:
            return
        self._young.extend(incomplete)
        self._services.checkpoints.withdraw([pending.name for pending in incomplete])
        if not self._has_warned_of_late_files:
            self._has_warned_of_late_files = True
            self._print(
                f"[DT-431] rank {event.rank} has begun to save, so {_names(incomplete)}, committed without its files, "
                "must be committed again with them. If the ranks save at different times, pass report(..., "
                'checkpoint_ranks="all")'
            )

    def add(self, event: Reported) -> None:
        """Add the report of a rank, with or without a checkpoint."""
        if event.directory is None:
            self._pending.add(event)
            return
        self.announce(FilesAnnounced(event.rank, event.number))
        self._pending.add(event)
        if event.awaited:
            self._requests.await_commit(event.number, event.rank)
        if self._pending.is_closed(event.number):  # the checkpoint was committed, and retention has dropped it
            self._services.checkpoints.discard(event.directory)
            self._requests.note_commit(event.number)
        elif (pending := self._pending.get(event.number)) is not None and len(pending.directories) == 1:
            self._young.append(pending)

    def note_combined(self, combined: Mapping[int, Mapping[str, float]]) -> None:
        """Record the values that were combined over the ranks, by report number."""
        for number, values in combined.items():
            self._pending.note_combined(number, values)

    def upload(self, event: Uploaded) -> None:
        """Record the end of a background upload."""
        self._pending.upload(event)

    def finish(self, rank: int) -> None:
        """Record that a rank will not report again."""
        self._pending.finish(rank)

    def respond(self, event: CommitOverdue | FilesClaimed) -> None:
        """Respond to a request of a rank that reports a checkpoint."""
        if isinstance(event, FilesClaimed):
            self._requests.claim(event)
        else:
            pending = self._pending.get(event.number)
            self._requests.explain(event.number, event.rank, pending.missing if pending is not None else ())

    def restart(self, last_number: int, lost: Sequence[int]) -> None:
        """Discard the checkpoints that will not be completed because ranks were lost."""
        self._pending.restart(last_number, lost)

    def next_check(self) -> float | None:
        """Return the monotonic time at which :meth:`commit_complete` has work to do without an event; None if never."""
        if not self._ranks.starting:
            self._pending.note_started()
        while self._young and self._pending.get(self._young[0].number) is not self._young[0]:
            self._young.popleft()
        warning = max(self._young[0].waiting_since + _WARNING_S, self._no_warning_before) if self._young else None
        times = [moment for moment in (self._pending.next_expiry, warning) if moment is not None]
        return min(times, default=None)

    def commit_complete(self) -> bool:
        """Commit the checkpoints that are complete; return True if there was one."""
        if not self._pending.has_waiting:
            return False
        committed = False
        for pending in self._pending.take_complete():
            committed |= self._commit(pending)
        if committed:
            numbers = {entry.number for entry in self._services.checkpoints.committed}
            for closed in self._pending.close(numbers):
                self._requests.forget(closed.name)
        self._warn_of_old()
        return committed

    def describe_uncommitted(self) -> str:
        """Return a message about the checkpoints that were reported and are not committed; empty if there are none."""
        committed = {entry.name for entry in self._services.checkpoints.committed}
        pending = [each for each in self._pending if each.name not in committed]
        if not pending:
            return ""
        return (
            f"[DT-424] not committed, and lost: {_names(pending)}. They waited for files or reports of "
            f"{_missing(pending)}. To wait for the commit, call report(..., wait=True)"
        )

    def _warn_of_old(self) -> None:
        """Name the checkpoints that have been waiting for other ranks' reports for long."""
        now = time.monotonic()
        if not self._young or now < max(self._young[0].waiting_since + _WARNING_S, self._no_warning_before):
            return
        while self._young and now >= self._young[0].waiting_since + _WARNING_S:
            self._young.popleft()
        old = [each for each in self._pending if each.awaited and now >= each.waiting_since + _WARNING_S]
        if not old:  # they wait for uploads
            return
        self._no_warning_before = now + _WARNING_PAUSE_S
        oldest = old[0]
        report, savers = "reports" if len(oldest.awaited) == 1 else "report", sorted(oldest.directories)
        if oldest.declared:
            reason = f"{report} the checkpoint, because a report declares that all of them take part"
        elif oldest.reduce:
            reason = f"{report} as often, because a report of the checkpoint combines values of all ranks (reduce=...)"
        else:
            reason = (
                f"{report} as often, because a checkpoint had files of these ranks before. If only "
                f"{describe_ranks(savers)} {'has' if len(savers) == 1 else 'have'} files now, pass report(..., "
                f"checkpoint_ranks={savers})"
            )
        self._print(
            f"[DT-430] not committed for {now - oldest.waiting_since:.0f} s: {_names(old)}, until {_missing(old)} "
            f"{reason}"
        )

    def _commit(self, pending: PendingCheckpoint) -> bool:
        """Commit a checkpoint; return False if a lost process has taken files of it with it."""
        names = sorted(set(pending.directories.values()))
        if len(names) > 1:
            raise CheckpointError(
                f"[DT-411] checkpoint_dir_name: expected the same name on all ranks, got {', '.join(names)}"
            )
        if pending.undelivered:
            function = "shared_checkpoint()" if pending.is_shared else "report(checkpoint_ranks=...)"
            raise CheckpointError(
                f"[DT-417] {function}: expected every rank that takes part to report {pending.name}, got no report "
                f"from {describe_ranks(pending.undelivered)}. Make every one of them save and report it"
            )
        files = self._files_of_shared(pending) if pending.is_shared else pending.files
        if files is None:
            return False
        metrics = dict(pending.metrics[min(pending.metrics)])
        metrics.update(combine(pending.metrics, pending.reduce))  # if a rank ends before it makes the report
        contributors, world_size = sorted(pending.directories), len(self._ranks)
        entry = self._services.checkpoints.commit(
            number=pending.number,
            iteration=pending.iteration,
            files=files,
            metrics=writable(metrics),
            name=names[0],
            world_size=world_size,
            ranks=contributors if len(contributors) < world_size else (),
        )
        self._requests.note_commit(pending.number)
        self._services.callbacks.call("on_checkpoint", entry)
        return True

    def _files_of_shared(self, pending: PendingCheckpoint) -> Mapping[int, Mapping[str, StoredFile]] | None:
        """Return the uploaded files of a checkpoint that all ranks have saved together.

        In a local run directory, no rank has uploaded files. Otherwise, one rank of each node has uploaded all files of
        its node, and only the files of these ranks are returned. None means that a process of a node was lost after it
        had reported the checkpoint, and before the last process of the node uploaded it. The event that the process has
        exited follows.

        Raises:
            CheckpointError: no rank has written a file.
        """
        storage, name = self._services.run.storage, pending.name
        if storage.is_local:
            if not storage.walk(name):
                raise CheckpointError(
                    "[DT-408] report(): expected files in the shared checkpoint's directory, got none from any rank in "
                    f"{storage.path(name)}. Save the checkpoint to its path before calling report()"
                )
            return pending.files
        uploaded = {rank: files for rank, files in pending.files.items() if files}
        nodes = {rank.worker.node_id for rank in self._ranks}
        if without := nodes - {self._ranks[rank].worker.node_id for rank in uploaded}:
            self._print(f"{name} is not committed, because no process of {', '.join(without)} has uploaded it")
            return None
        return uploaded

    def _print(self, text: str) -> None:
        run = self._services.run
        run.console.print(f"{run.name}: {text}", error=True)


def _names(pending: Sequence[PendingCheckpoint]) -> str:
    names = [name for checkpoint in pending for name in sorted(set(checkpoint.directories.values()))]
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def _missing(pending: Sequence[PendingCheckpoint]) -> str:
    return describe_ranks(sorted({rank for checkpoint in pending for rank in checkpoint.missing}))
