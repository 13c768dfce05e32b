"""Commit and retention.

**How a checkpoint is committed.** The ranks have uploaded their files to ``checkpoint_<number>/``. The controller
decides which rank's file is kept if several ranks uploaded files under one path, writes the listing (the list of files)
into the directory, and then replaces ``manifest.json`` atomically. That replacement is the commit. A checkpoint that is
not in the manifest is not committed, and its files are deleted before the next attempt. The new manifest also leaves
out the checkpoints that retention drops. A thread deletes the files of these checkpoints later, once it has flushed the
new checkpoint to the disk.

**A missing manifest is damage.** The manifest is the first file of a new run, and empty until the first commit. So a
directory without a manifest is new or has lost it. The listing in a checkpoint's directory contains the checkpoint's
manifest entry, so a lost manifest is recreated from the directories whose files are complete.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any, NamedTuple

from drivetrain._base.crashpoints import reach
from drivetrain._storage.checkpoint import Checkpoint, checkpoint_in, immutable_files, parse_listing
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.duplicates import describe_ranks, settle_duplicates
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.holds import delete_unless_held, is_held
from drivetrain._storage.layout import (
    CHECKPOINT_NAME_PATTERN,
    LISTING_FILE,
    MANIFEST,
    PENDING,
    VERSION,
    announced_name,
    announcement_name,
    check_version,
    checkpoint_name,
    draft_target,
)
from drivetrain._storage.reading import Fields, is_damage, parse_json
from drivetrain._storage.reports import rank_files
from drivetrain._storage.retention import Janitor, is_finite, retained
from drivetrain.config import CheckpointConfig
from drivetrain.errors import CheckpointError, StorageError

__all__ = ["CheckpointManager", "delete_checkpoints", "read_manifest"]


class _Leftovers(NamedTuple):
    """The files that :meth:`CheckpointManager.sweep` deletes.

    Attributes:
        orphans: the names of the checkpoint directories that are not committed.
        announced: the names of the checkpoint directories that files in
            :data:`~drivetrain._storage.layout.PENDING` announce.
        drafts: the names of incomplete files in ``PENDING``.
    """

    orphans: list[str]
    announced: list[str]
    drafts: list[str]


class _Manifest:
    """The file ``manifest.json`` of a run.

    Args:
        storage: the run directory.
        warn: called with a message if the manifest is damaged or missing.
        check_lock: see :class:`CheckpointManager`.

    Attributes:
        entries: the committed checkpoints, oldest first.
    """

    def __init__(self, storage: Storage, warn: Callable[[str], None], check_lock: Callable[[], None]) -> None:
        self._storage = storage
        self._check_lock = check_lock
        self.entries, self._is_intact = _read(storage, warn)
        self._unconfirmed: list[CommittedCheckpoint] | None = None
        """The entries of a manifest whose write has raised an exception; None if the last write succeeded."""
        self._written: list[CommittedCheckpoint] = []
        self._lines: list[bytes] = []
        """The entries that were written last, as JSON, so that a commit encodes only the new one."""

    def create(self) -> None:
        """Write the manifest of a new run, or the recovered manifest of a damaged one."""
        if not self._is_intact:
            # An empty manifest is not worth a flush to the disk: after a power failure, it would only be recreated.
            self._write(self.entries, durable=bool(self.entries))

    def replace(self, entries: list[CommittedCheckpoint]) -> None:
        """Replace the manifest atomically, which is the commit."""
        self._unconfirmed = entries
        reach("before manifest write")
        self._write(entries)
        reach("after manifest write")
        self.entries, self._unconfirmed = entries, None

    def confirm(self) -> None:
        """Find out whether a write of the manifest that raised an exception has taken effect.

        The storage may have replaced the file although it reported an error, for example after a lost connection.

        Raises:
            StorageError: the manifest cannot be read.
        """
        if self._unconfirmed is not None:
            names = [entry.name for entry in self._unconfirmed]
            if [entry.name for entry in read_manifest(self._storage)] == names:
                self.entries = self._unconfirmed
            self._unconfirmed = None

    def _write(self, entries: Sequence[CommittedCheckpoint], *, durable: bool = True) -> None:
        body = b",\n".join(self._encode(list(entries)))
        manifest = b'{"version": %d, "checkpoints": [\n%b\n]}\n' % (VERSION, body)
        try:
            self._storage.write_bytes(MANIFEST, manifest, durable=durable, guard=self._check_lock)
        except StorageError:
            self._check_lock()  # the draft may be missing because another driver has taken the run over
            raise
        self._is_intact = True

    def _encode(self, entries: list[CommittedCheckpoint]) -> list[bytes]:
        """Return entries as JSON. In the usual case, all but the last are those that were written before."""
        before = len(self._written)
        if entries[:before] == self._written:
            self._lines += [_as_json(entry) for entry in entries[before:]]
        else:
            known = dict(zip(map(id, self._written), self._lines, strict=True))
            self._lines = [known.get(id(entry)) or _as_json(entry) for entry in entries]
        self._written = entries
        return self._lines


class CheckpointManager:
    """The committed checkpoints of a run.

    Args:
        storage: the run directory.
        config: the rules that select the checkpoints to keep.
        metadata: the trainer's metadata, which is stored with every checkpoint.
        warn: called with a message if a checkpoint or the manifest is damaged, or if a checkpoint cannot be deleted.
        check_lock: called before each change of the run; raises an exception if another driver has taken over the run.
            Callers can call it too.
        push: called before each commit; uploads the results, so that they are not older than the checkpoint.
    """

    def __init__(
        self,
        storage: Storage,
        config: CheckpointConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = lambda line: None,
        check_lock: Callable[[], None] = lambda: None,
        push: Callable[[], None] = lambda: None,
    ) -> None:
        self.check_lock = check_lock
        self._push = push
        self._storage = storage
        self._config = config or CheckpointConfig()
        self._metadata = dict(metadata or {})
        self._warn = warn
        self._manifest = _Manifest(storage, warn, check_lock)
        self._withdrawn: dict[str, CommittedCheckpoint] = {}
        self._damaged: set[str] = set()
        self._has_warned_of_conflicts = False
        self._janitor = Janitor(storage, warn)

    def create_manifest(self) -> None:
        """Write the manifest if it is missing or damaged. From then on, it alone says what is committed."""
        self._manifest.create()

    @property
    def committed(self) -> list[CommittedCheckpoint]:
        """The entries of the manifest, oldest first."""
        return self._manifest.entries

    @property
    def latest(self) -> CommittedCheckpoint | None:
        """The newest checkpoint that is not known to be damaged or incomplete; None if there is none.

        With ``CheckpointConfig(resume_from="latest_finite")``, this is the newest finite one, if there is one.
        """
        intact = [entry for entry in self.committed if entry.name not in self._damaged]
        if self._config.resume_from == "latest_finite":
            attribute = self._config.checkpoint_score_attribute
            intact = [entry for entry in intact if is_finite(entry, attribute)] or intact
        return intact[-1] if intact else None

    @property
    def last_number(self) -> int:
        """The highest report number of a committed checkpoint; 0 if there is none."""
        return self.committed[-1].number if self.committed else 0

    def checkpoint(self, entry: CommittedCheckpoint) -> Checkpoint:
        """Return the checkpoint that an entry of the manifest describes."""
        return checkpoint_in(self._storage, entry.name)

    def verify(self) -> CommittedCheckpoint | None:
        """Return the newest checkpoint whose files are complete, or None. Warn about newer, damaged checkpoints."""
        while (entry := self.latest) is not None:
            try:
                self.checkpoint(entry).verify()
                return entry
            except CheckpointError as error:
                damage = str(error)
            except StorageError as error:
                if not is_damage(error):
                    raise
                damage = str(error)
            self._damaged.add(entry.name)
            self._warn(f"{damage}. The checkpoint is left unchanged, and the one before it is used")
        return None

    def commit(
        self,
        *,
        number: int,
        iteration: int,
        files: Mapping[int, Mapping[str, StoredFile]],
        metrics: Mapping[str, Any],
        name: str | None = None,
        world_size: int = 0,
        ranks: Sequence[int] = (),
    ) -> CommittedCheckpoint:
        """Commit the files that the ranks uploaded for a report, and apply retention.

        If the checkpoint has been committed before, the files of further ranks are added to it.

        Args:
            number: the report's number in the run.
            iteration: the report's iteration.
            files: the uploaded files of each rank, by rank and then by relative path. A rank without files has written
                its files into the directory itself.
            metrics: the report's metrics.
            name: the name of the checkpoint's directory; None for the default name.
            world_size: the number of ranks.
            ranks: the ranks that contribute to the checkpoint; empty for all ranks.

        Raises:
            CheckpointError: another report's checkpoint has the same name; or, with ``on_conflict="error"``, two ranks
                uploaded different content under the same path.
            StorageError: the manifest could not be written, so nothing is committed.
        """
        name = name or checkpoint_name(number)
        existing = next((entry for entry in self.committed if entry.name == name), self._withdrawn.get(name))
        if existing and existing.number != number:
            raise CheckpointError(
                f"[DT-411] a checkpoint: expected a directory that is new in the run, got {name!r}, which is "
                "committed already"
            )
        is_next = existing is None and number > self.last_number
        listed: dict[str, StoredFile] = {}
        if existing:
            listed = self._listed(name)
            files = {rank: stored for rank, stored in files.items() if not existing.has_files_of(rank)}
        conflict = self._config.on_conflict
        merged, conflicts = settle_duplicates(self._storage, name, files, on_conflict=conflict, committed=listed)
        if conflicts and conflict == "lowest_rank" and not self._has_warned_of_conflicts:
            self._has_warned_of_conflicts = True
            self._warn(_conflict_warning(name, conflicts))
        if not all(files.values()):  # a rank has written its files into the directory itself
            merged = {path: StoredFile(size) for path, size in self._storage.walk(name).items()} | merged
        if self._metadata:
            checkpoint = checkpoint_in(self._storage, name)
            checkpoint.set_metadata({**self._metadata, **checkpoint.get_metadata()})
        entry = existing or CommittedCheckpoint(
            name=name,
            number=number,
            iteration=iteration,
            metrics=dict(metrics),
            time=time.time(),
            ordinal=max(map(attrgetter("ordinal"), [*self.committed, *self._withdrawn.values()]), default=0) + 1,
        )
        entry = replace(entry, metrics=dict(metrics), world_size=world_size, ranks=tuple(ranks))
        listing = {"version": VERSION, "entry": asdict(entry), "files": dict(sorted(immutable_files(merged).items()))}
        self._storage.write_bytes(f"{name}/{LISTING_FILE}", json.dumps(listing).encode(), durable=False)
        self._withdrawn.pop(name, None)
        self._damaged.discard(name)
        entries = [*self.committed, entry]
        if not is_next:
            others = [other for other in self.committed if other.name != name]
            entries = sorted([*others, entry], key=lambda entry: entry.number)
        kept = retained(entries, self._config, self._is_protected)
        dropped: list[CommittedCheckpoint] = []
        if len(kept) < len(entries):
            names = {old.name for old in kept}
            dropped = [old for old in entries if old.name not in names]
        self._replace(kept, dropped)
        if name != checkpoint_name(number) and entry in kept:
            self._storage.delete(announcement_name(name))
        return entry

    def withdraw(self, names: Collection[str]) -> None:
        """Remove checkpoints from the manifest that turn out to be incomplete, so that they can be committed again.

        Raises:
            StorageError: the manifest could not be written, so nothing is withdrawn.
        """
        withdrawn = [entry for entry in self.committed if entry.name in names]
        if withdrawn:
            self._damaged.update(entry.name for entry in withdrawn)  # even if the manifest cannot be written
            self._announce(withdrawn)
            self._replace([entry for entry in self.committed if entry not in withdrawn])
            self._withdrawn.update({entry.name: entry for entry in withdrawn})

    def discard(self, name: str) -> None:
        """Schedule the deletion of files that were stored in a directory after the checkpoint there was dropped."""
        self._janitor.submit(self.last_name, [name])

    def _announce(self, entries: Sequence[CommittedCheckpoint]) -> None:
        """Record the custom names among those of checkpoints, so that a sweep finds the directories."""
        for entry in entries:
            if not CHECKPOINT_NAME_PATTERN.fullmatch(entry.name):
                self._storage.write_bytes(announcement_name(entry.name), b"", durable=False)

    def _replace(self, kept: list[CommittedCheckpoint], dropped: Sequence[CommittedCheckpoint] = ()) -> None:
        """Replace the manifest by one with the kept entries, and schedule the deletion of the dropped checkpoints."""
        self._announce(dropped)
        self.check_lock()
        self._push()
        self._manifest.replace(kept)
        if dropped:
            self._janitor.submit(self.last_name, [old.name for old in dropped])

    def _find_leftovers(self) -> _Leftovers:
        names = {entry.name for entry in self.committed}
        directories, files = self._storage.list_names()
        # A file or a link with the name of a checkpoint is deleted as well, but never the target of a link.
        orphans = [
            name for name in [*directories, *files] if CHECKPOINT_NAME_PATTERN.fullmatch(name) and name not in names
        ]
        pending = self._storage.list_names(PENDING)[1] if PENDING in directories else []  # empty if PENDING is a link
        drafts = [file for file in pending if draft_target(file)]  # a crash interrupted the replacement of a file
        where = self._storage.path(PENDING)
        # No pattern shows that a directory with a custom name is a checkpoint. Only its announcement does.
        announced = [announced_name(file, where) for file in pending if file not in drafts]
        orphans += [name for name in announced if name.partition("/")[0] in directories and name not in names]
        return _Leftovers(orphans, announced, drafts)

    @property
    def last_name(self) -> str:
        """The directory of the committed checkpoint with the highest number; empty if there is none."""
        return self.committed[-1].name if self.committed else ""

    def sweep(self) -> tuple[list[str], int]:
        """Delete checkpoint directories that were never committed, or that retention has dropped.

        Returns:
            The names of the deleted directories, and the highest report number among all uncommitted directories, or
            0. New reports must not use this number, because a worker on a lost node may still be writing to the
            directory with this number.
        """
        self._manifest.confirm()
        self._withdrawn.clear()
        self._janitor.wait()
        orphans, announced, drafts = self._find_leftovers()
        for file in drafts:
            self._storage.delete(f"{PENDING}/{file}")
        deleted = []
        for name in orphans:
            reach("during sweep")
            self.check_lock()  # another driver may be using the directory
            if delete_unless_held(self._storage, name):
                deleted.append(name)
        for name in announced:
            if name in deleted or name not in orphans:
                self._storage.delete(announcement_name(name))
        numbers = [int(match[1]) for name in orphans if (match := CHECKPOINT_NAME_PATTERN.fullmatch(name))]
        return deleted, max(numbers, default=0)

    def leftovers(self) -> list[str]:
        """Return the directories that :meth:`sweep` would delete if no process were reading them."""
        return self._find_leftovers().orphans

    def droppable(self, config: CheckpointConfig) -> list[CommittedCheckpoint]:
        """Return the committed checkpoints that retention with the rules in ``config`` would drop, oldest first."""
        names = {entry.name for entry in retained(self.committed, config, self._is_protected)}
        return [entry for entry in self.committed if entry.name not in names]

    def drop(self, entries: Sequence[CommittedCheckpoint]) -> None:
        """Remove checkpoints from the manifest, and schedule the deletion of their files.

        Raises:
            StorageError: the manifest could not be written, so nothing is dropped.
        """
        if entries:
            names = {entry.name for entry in entries}
            self._replace([entry for entry in self.committed if entry.name not in names], entries)

    def close(self) -> None:
        """Apply retention once more, and wait until the dropped checkpoints are deleted.

        A checkpoint that a worker was reading at the last commit, because it resumed from it, is dropped now.
        """
        try:
            self._manifest.confirm()
            self.drop(self.droppable(self._config))
        except StorageError as error:
            self._warn(f"cannot drop checkpoints at the end of the run: {error}")
        self._janitor.close()

    def _is_protected(self, entry: CommittedCheckpoint) -> bool:
        if self._storage.find_link(entry.name) is not None:
            return False
        return is_held(self._storage, entry.name) or self.checkpoint(entry).is_pinned()

    def _listed(self, name: str) -> dict[str, StoredFile]:
        data = self._storage.read_bytes(f"{name}/{LISTING_FILE}")
        where = self._storage.path(name, LISTING_FILE)
        if data is None:
            raise StorageError(f"[DT-413] {where}: expected the list of a checkpoint's files, which does not exist")
        return parse_listing(data, where)[0]


def _conflict_warning(name: str, conflicts: Mapping[str, Sequence[int]]) -> str:
    paths = list(conflicts)
    others = f" and {len(paths) - 1} other files" if len(paths) > 1 else ""
    return (
        f"[DT-422] {describe_ranks(conflicts[paths[0]])} reported {paths[0]!r}{others} for {name}. The file of the "
        "lowest rank is kept, here and in later checkpoints. To avoid this warning, report the file from one rank "
        'only. To keep all files, set CheckpointConfig(on_conflict="keep_all")'
    )


def read_manifest(storage: Storage, warn: Callable[[str], None] = lambda line: None) -> list[CommittedCheckpoint]:
    """Return the committed checkpoints of a run, oldest first.

    If the manifest is damaged or missing, the checkpoints are found by the listings in their directories.

    Args:
        storage: the run directory.
        warn: called with a message if the manifest is damaged, or if it is missing although there are reports or
            checkpoints.

    Raises:
        StorageError: a newer drivetrain wrote the manifest, or the storage cannot be read.
    """
    return _read(storage, warn)[0]


def _as_json(entry: CommittedCheckpoint) -> bytes:
    return json.dumps(asdict(entry)).encode()


def _read(storage: Storage, warn: Callable[[str], None]) -> tuple[list[CommittedCheckpoint], bool]:
    """Return the committed checkpoints as :func:`read_manifest` does, and whether the manifest is intact."""
    data = storage.read_bytes(MANIFEST)
    where = storage.path(MANIFEST)
    damage = "is missing"
    if data is not None:
        version, damage = VERSION, ""
        try:
            manifest = Fields(parse_json(data, where), where)
            version = manifest.integer("version")
            entries = manifest.items("checkpoints") if version <= VERSION else []
            found = [CommittedCheckpoint.parse(entry, where) for entry in entries]
        except StorageError as error:
            damage = f"is damaged ({str(error).removeprefix('[DT-413] ').removeprefix(where).lstrip(': ')})"
        check_version(version, where)
        if not damage:
            return found, True
    directories, _ = storage.list_names()
    found = _recover_entries(storage, directories)
    is_used = found or any(map(CHECKPOINT_NAME_PATTERN.fullmatch, directories))
    if data is not None or is_used or rank_files(storage):
        names = ", ".join(entry.name for entry in found[-3:]) or "none"
        warn(
            f"{where} {damage}: recovered {len(found)} checkpoints from the lists of files in their directories "
            f"(newest: {names})"
        )
    return found, False


def delete_checkpoints(storage: Storage) -> None:
    """Delete all checkpoints, committed or not, of a run that no driver works on. Its manifest is empty then."""
    checkpoints = CheckpointManager(storage)
    checkpoints.withdraw([entry.name for entry in checkpoints.committed])
    checkpoints.sweep()


def _recover_entries(storage: Storage, directories: Sequence[str]) -> list[CommittedCheckpoint]:
    found = []
    for name in directories:
        try:
            data = storage.read_bytes(f"{name}/{LISTING_FILE}")
            if data is None:
                continue
            files, entry = parse_listing(data, storage.path(name, LISTING_FILE))
            committed = CommittedCheckpoint.parse(entry, storage.path(name, LISTING_FILE))
            if committed.name == name and storage.find_damage(name, files) is None:
                found.append(committed)
        except StorageError as error:
            if not is_damage(error):  # the checkpoint may be complete, so it must not be omitted and then swept
                raise
    return sorted(found, key=lambda entry: entry.number)
