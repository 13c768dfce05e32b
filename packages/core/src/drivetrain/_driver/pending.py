"""Decides when a reported checkpoint is complete: once every rank that contributes to it has stored its files.

A rank contributes to a checkpoint if it reports files under the checkpoint's report number. Whether it will do so is
known in one of three ways:

1. **Declared.** A report says which ranks take part: with ``checkpoint_ranks=...``, or inside ``shared_checkpoint()``.
   All of these ranks must store files, and nothing else matters.
2. **From the checkpoint before.** A rank contributes if it has contributed to the last checkpoint that it has passed. A
   rank passes a checkpoint by making the report with its number, or a later one. A new attempt learns the contributors
   from the manifest.
3. **Unknown.** The first checkpoint of a run, and ranks that contribute only sometimes. The checkpoint waits until such
   a rank passes it, but only for a short time. A rank that lets this time pass counts as one that does not contribute.

A checkpoint also waits for a short time for rank 0, whose metrics it gets, and for the ranks that keep pace: they have
made every report but this one, or an earlier checkpoint still waits for them. A run that resumes from the checkpoint
does not make the report again, so their rows would be missing.

A rank that is about to store files announces it, so a slow upload is never mistaken for silence. Files that arrive
after the commit are added to the checkpoint by a second commit. If the rank has passed no checkpoint yet, the short
wait was too short for it: the checkpoints that it has not passed are incomplete. They are withdrawn, and committed
again once the rank has passed them. A rank that has passed a checkpoint without files contributes only to some, so
checkpoints without its files stay committed.

An event takes constant time, except for the first report of a checkpoint and for a rank that begins to contribute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._wire.events import CheckpointRanks, FilesAnnounced, Reported, Uploaded

if TYPE_CHECKING:
    from drivetrain._storage.filesystem import StoredFile

__all__ = ["SHORT_WAIT_S", "PendingCheckpoint", "PendingCheckpoints", "Roles"]

SHORT_WAIT_S = 0.7
"""Seconds for which a checkpoint waits for a rank that may contribute, so that it is committed within a second."""


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that ranks have reported.

    Attributes:
        number: the report number within the run.
        iteration: the smallest iteration of the reports with this number.
        waiting_since: the time in seconds at which the checkpoint began to wait.
        metrics: the metrics of each rank that has made the report.
        files: for each rank whose files are stored, these files by relative path.
        directories: for each rank that contributes, the name of the checkpoint's directory.
        reduce: the requested reductions, by metric; empty once ``metrics`` has the combined values.
        declaration: the value of ``checkpoint_ranks`` in the last report that has one.
        declared: the ranks that take part, if the reports say so; else empty.
        storing: the ranks that are storing files.
        awaited: the ranks that must make the report, however long this takes.
        unsure: the ranks that the checkpoint waits for only for a short time.
    """

    number: int
    iteration: int
    waiting_since: float
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: dict[int, dict[str, StoredFile]] = field(default_factory=dict)
    directories: dict[int, str] = field(default_factory=dict)
    reduce: dict[str, str] = field(default_factory=dict)
    declaration: CheckpointRanks = None
    declared: set[int] = field(default_factory=set)
    storing: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The name of the checkpoint's directory."""
        return min(self.directories.values())

    @property
    def is_shared(self) -> bool:
        """True if all ranks have saved into the same directory."""
        return self.declaration == "together"

    @property
    def missing(self) -> list[int]:
        """The ranks that the checkpoint waits for."""
        return sorted(self.storing | self.awaited | self.unsure)

    @property
    def undelivered(self) -> list[int]:
        """The declared ranks that have not reported the checkpoint."""
        return sorted(self.declared - self.directories.keys())


class Roles:
    """The knowledge about the ranks that contribute to checkpoints.

    Args:
        world_size: the number of ranks.
        committed: the committed checkpoints, oldest first. The newest one shows which ranks contribute.

    Attributes:
        contributors: the ranks that have contributed to the last checkpoint that they have passed.
        unsure: the ranks that have passed no checkpoint yet, and those that contribute only to some.
        optional: the ranks that have passed a checkpoint without contributing to it.
        reducing: the ranks that have requested reductions. A checkpoint with reductions needs their metrics.
    """

    def __init__(self, world_size: int, committed: Sequence[CommittedCheckpoint]) -> None:
        known = [entry for entry in committed if entry.world_size]
        newest, ranks = known[-1] if known else None, range(world_size)
        self._last_files = {rank: 0 for rank in ranks if any(entry.has_files_of(rank) for entry in known)}
        self.contributors = {rank for rank in ranks if newest is not None and newest.has_files_of(rank)}
        self.unsure = {rank for rank in ranks if newest is None or rank >= newest.world_size}
        self.unsure |= self._last_files.keys() - self.contributors
        self.optional: set[int] = set()
        self.reducing: set[int] = set()

    def note_files(self, rank: int, number: int) -> None:
        """Record that a rank contributes to a checkpoint."""
        self._last_files[rank] = max(number, self._last_files.get(rank, 0))
        self.contributors.add(rank)
        self.unsure.discard(rank)

    def note_pass(self, rank: int, number: int) -> None:
        """Record that a rank has passed a checkpoint without contributing to it."""
        self.optional.add(rank)
        self.exclude(rank, number)

    def exclude(self, rank: int, number: int) -> None:
        """Record that a rank does not contribute to a checkpoint, as far as is known."""
        last = self._last_files.get(rank)
        if last is not None and last > number:  # the rank has contributed to a later checkpoint
            return
        self.contributors.discard(rank)
        (self.unsure.discard if last is None else self.unsure.add)(rank)


class PendingCheckpoints:
    """The checkpoints of one attempt that are not complete.

    Args:
        world_size: the number of ranks.
        last_number: the report number from which the ranks continue counting.
        committed: see :class:`Roles`.
        clock: returns the current time in seconds.
    """

    def __init__(
        self,
        world_size: int,
        last_number: int = 0,
        committed: Sequence[CommittedCheckpoint] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._roles = Roles(world_size, committed)
        self._waiting: dict[int, PendingCheckpoint] = {}
        self._expect_all(world_size, last_number)

    def _expect_all(self, world_size: int, last_number: int) -> None:
        """Wait for all ranks, which continue counting from ``last_number``."""
        self._latest = [last_number] * world_size
        self._unreported = set(range(world_size))
        self._running = set(range(world_size))
        self._started_at: float | None = None
        self._announced: dict[int, set[int]] = {}
        self._released: dict[int, PendingCheckpoint] = {}  # those that a rank may still add files to
        self._closed: set[int] = set()  # the numbers of those that no files can be added to
        self._expiring: deque[PendingCheckpoint] = deque()
        self._changed: set[int] = set()

    def __iter__(self) -> Iterator[PendingCheckpoint]:
        """Iterate over the checkpoints, ordered by number."""
        return iter([pending for _, pending in sorted(self._waiting.items())])

    @property
    def has_waiting(self) -> bool:
        """True if there are checkpoints that wait."""
        return bool(self._waiting)

    def get(self, number: int) -> PendingCheckpoint | None:
        """Return the checkpoint with this report number; None if it does not wait."""
        return self._waiting.get(number)

    def is_closed(self, number: int) -> bool:
        """Return True if files that are reported with this number are too late."""
        return number in self._closed

    def note_started(self) -> None:
        """Record that all ranks are in the train function. The short wait does not begin earlier."""
        if self._started_at is None:
            self._started_at = self._clock()

    def announce(self, event: FilesAnnounced) -> list[PendingCheckpoint]:
        """Record that a rank is about to store files. Return the checkpoints that are now known to be incomplete."""
        rank, number, roles = event.rank, event.number, self._roles
        is_new, is_optional = rank not in roles.contributors, rank in roles.optional
        roles.note_files(rank, number)
        if (released := self._released.get(number)) is not None:
            self._reopen(released)
        if (pending := self._waiting.get(number)) is not None:
            pending.storing.add(rank)
        elif number not in self._closed:
            self._announced.setdefault(number, set()).add(rank)
        if not is_new:
            return []
        lacking = [later for later in self._released.values() if later.number > number and not later.declared]
        for later in [] if is_optional else lacking:
            self._reopen(later)
        for later in self._waiting.values():
            if later.number > number and not later.declared:
                later.awaited.add(rank)
                later.unsure.discard(rank)
        return [] if is_optional else [*([released] if released is not None else []), *lacking]

    def _reopen(self, released: PendingCheckpoint) -> None:
        """Make a released checkpoint wait again, because a rank adds files, or may add files."""
        released.waiting_since = self._clock()
        self._waiting[released.number] = self._released.pop(released.number)

    def add(self, event: Reported) -> None:
        """Add the report of a rank, with or without files."""
        rank, number = event.rank, event.number
        before, self._latest[rank] = self._latest[rank], number
        if event.reduce:
            self._roles.reducing.add(rank)
        if event.directory is not None and number not in self._closed:
            self._add_files(event, event.directory)
        elif (announced := self._announced.get(number)) is not None:  # the rank could not store its files
            announced.discard(rank)
        self._unreported.discard(rank)
        if not self._waiting:
            return
        for passed in range(before + 1, number + 1):
            if (pending := self._waiting.get(passed)) is not None:
                self._pass(pending, rank)
        if (pending := self._waiting.get(number)) is not None:
            pending.metrics[rank] = event.metrics

    def _add_files(self, event: Reported, directory: str) -> None:
        rank, number = event.rank, event.number
        self._roles.note_files(rank, number)
        pending = self._waiting.get(number)
        if is_first := pending is None:
            pending = self._waiting[number] = PendingCheckpoint(number, event.iteration, self._clock())
            pending.storing = self._announced.pop(number, set())
            self._expiring.append(pending)
        pending.iteration = min(pending.iteration, event.iteration)
        pending.directories[rank] = directory
        pending.reduce.update(event.reduce or {})
        if event.files is None:
            pending.storing.add(rank)
        else:
            pending.files[rank] = event.files
            pending.storing.discard(rank)
        is_declaration = event.checkpoint_ranks is not None and event.checkpoint_ranks != pending.declaration
        if is_declaration:
            pending.declaration = event.checkpoint_ranks
            every = range(len(self._latest))
            pending.declared.update(every if isinstance(pending.declaration, str) else pending.declaration or ())
        if is_first or is_declaration:
            self._await_others(pending)

    def _await_others(self, pending: PendingCheckpoint) -> None:
        """Determine the ranks that a checkpoint waits for."""
        roles, number = self._roles, pending.number
        behind = {rank for rank in self._running if self._latest[rank] < number}
        if pending.declared:
            pending.awaited, pending.unsure = pending.declared & behind, set()
        else:
            for rank in (roles.contributors | roles.unsure) - behind - pending.directories.keys() - pending.storing:
                roles.note_pass(rank, number)
            pending.awaited, pending.unsure = roles.contributors & behind, roles.unsure & behind
        if pending.reduce:
            pending.awaited |= roles.reducing & behind
            pending.unsure |= self._unreported & behind
        keep_pace = {rank for rank in behind if self._latest[rank] == number - 1}
        for earlier in self._waiting.values():
            if earlier.number < number:
                keep_pace |= behind & (earlier.awaited | earlier.unsure)
        pending.unsure |= (behind & {0}) | keep_pace
        pending.unsure -= pending.awaited

    def _pass(self, pending: PendingCheckpoint, rank: int) -> None:
        """Record that a rank has made the report of a checkpoint, or a later one."""
        pending.awaited.discard(rank)
        pending.unsure.discard(rank)
        if rank not in pending.directories:
            pending.storing.discard(rank)
            if not pending.declared:
                self._roles.note_pass(rank, pending.number)
        self._changed.add(pending.number)

    def note_combined(self, number: int, values: Mapping[str, float]) -> None:
        """Replace the metrics of a report by those that were combined over all ranks that have made it."""
        for checkpoints in (self._waiting, self._released):
            if (pending := checkpoints.get(number)) is not None:
                pending.metrics = {rank: {**metrics, **values} for rank, metrics in pending.metrics.items()}
                pending.reduce = {}

    def upload(self, event: Uploaded) -> None:
        """Record the end of a background upload."""
        if (pending := self._waiting.get(event.number)) is not None:
            pending.files[event.rank] = event.files
            pending.storing.discard(event.rank)
            self._changed.add(event.number)

    def finish(self, rank: int) -> None:
        """Record that a rank will not report again."""
        self._running.discard(rank)
        for pending in self._waiting.values():
            pending.awaited.discard(rank)
            pending.unsure.discard(rank)
            if rank not in pending.directories:
                pending.storing.discard(rank)
        self._changed.update(self._waiting)

    @property
    def next_expiry(self) -> float | None:
        """The time in seconds at which the next short wait ends; None if no checkpoint waits for a short time."""
        while self._expiring and (self._expiring[0].number not in self._waiting or not self._expiring[0].unsure):
            self._expiring.popleft()
        if not self._expiring or self._started_at is None:
            return None
        return max(self._expiring[0].waiting_since, self._started_at) + SHORT_WAIT_S

    def take_complete(self) -> list[PendingCheckpoint]:
        """Remove the checkpoints that are complete, and return them ordered by number."""
        while (expiry := self.next_expiry) is not None and self._clock() >= expiry:
            self._expire(self._expiring.popleft())
        changed, self._changed = sorted(self._changed), set()
        waiting = [self._waiting[number] for number in changed if number in self._waiting]
        complete = [pending for pending in waiting if not pending.missing]
        for each in complete:
            self._released[each.number] = self._waiting.pop(each.number)
        return complete

    def _expire(self, expired: PendingCheckpoint) -> None:
        """End the short wait of a checkpoint. Later ones do not wait for files of ranks that have never contributed."""
        for rank in () if expired.declared else expired.unsure:
            self._roles.exclude(rank, expired.number)
        late, expired.unsure = expired.unsure, set()
        for pending in self._waiting.values():  # another one may still get files from those that contribute to some
            pending.unsure -= late if pending.declared else late - self._roles.unsure
        self._changed.update(self._waiting)

    def close(self, kept: Collection[int]) -> list[PendingCheckpoint]:
        """Remove and return the completed checkpoints to which no rank can add files.

        Args:
            kept: the numbers of the checkpoints that are committed. Retention may have dropped others.
        """
        behind = min((self._latest[rank] for rank in self._running), default=None) if self._released else None
        closed = [
            released
            for number, released in self._released.items()
            if number not in kept or behind is None or behind >= number
        ]
        for released in closed:
            del self._released[released.number]
            self._closed.add(released.number)
        return closed

    def restart(self, number: int, lost: Collection[int]) -> None:
        """Discard the checkpoints that will not be completed. All ranks continue counting from ``number``.

        Args:
            number: the report number.
            lost: the lost ranks. A checkpoint that waits only for uploads of other ranks is kept.
        """
        self._waiting = {
            pending.number: pending
            for pending in self._waiting.values()
            if not pending.awaited and not pending.unsure and pending.storing <= pending.directories.keys() - set(lost)
        }
        self._expect_all(len(self._latest), number)
