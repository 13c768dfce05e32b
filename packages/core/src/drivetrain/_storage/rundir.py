"""Opens the directory of a new or resumed run, and keeps it locked while the driver works on the run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import posixpath
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain._base.redact import redact
from drivetrain._storage.directory import Storage, open_storage, runs_location, with_short_deadline
from drivetrain._storage.filesystem import flush_to_disk
from drivetrain._storage.layout import (
    ARTIFACTS,
    CHECKPOINT_NAME_PATTERN,
    ERROR_FILES,
    LISTING_FILE,
    LOCK_FILE,
    LOGS,
    RUN_FILE,
    STAGED_RUNS,
    TRAINER_FILE,
    VERSION,
    check_version,
    draft_target,
    is_reserved,
    run_file,
    staging_key,
)
from drivetrain._storage.lock import RunLock
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._storage.mirror import Mirror
from drivetrain._storage.node import share_directory, sweep
from drivetrain._storage.remote import locate
from drivetrain._storage.transfer import Limits
from drivetrain._version import __version__
from drivetrain.config import RunConfig
from drivetrain.errors import RunExistsError, RunInUseError, StorageError

__all__ = ["OpenRun", "locate_run", "open_run"]

_WAYS_TO_RESUME = ("never", "auto", "must")
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_MAX_FACT_CHARS = 1 << 20
"""The maximum length of a text in ``run.json``. A configuration with long lists could exceed the file's size limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """A run that this driver works on.

    Attributes:
        name: the name of the run.
        id: the id of the run.
        driver_count: the number of drivers that have worked on the run, including this driver.
        last_number: the highest report number that the run has used; 0 for a new run.
        storage: the run directory.
        directory: the directory for the files of callbacks. It is the run directory itself if that is local, and
            otherwise a local directory whose files are uploaded to the run directory.
        checkpoints: the committed checkpoints.
        resumed: a message that says from where the run continues; empty for a new run.
        push: uploads the new and changed files in ``directory`` to the run directory, if that is remote.
    """

    name: str
    id: str
    driver_count: int
    last_number: int
    storage: Storage
    directory: Path
    checkpoints: CheckpointManager
    resumed: str
    push: Callable[[], None]


@contextlib.contextmanager
def open_run(
    storage: Storage,
    config: RunConfig,
    facts: Mapping[str, Any],
    metadata: Mapping[str, Any],
    trainer: bytes,
    notify: Callable[[str], None],
    on_lost: Callable[[RunInUseError], None] = lambda error: None,
) -> Iterator[OpenRun]:
    """Open the run directory for the duration of a ``with`` block.

    Args:
        storage: the run directory, as :func:`locate_run` returns it.
        config: the configuration of the run, with whether to resume it.
        facts: fields of ``run.json`` that describe the run, such as the trainer and its configuration.
        metadata: the trainer's metadata, which is stored with every checkpoint.
        trainer: the content of ``trainer.pkl``, which ``restore`` reads.
        notify: called with a message about a wait, about damage or about a failed upload, on any thread.
        on_lost: called on another thread if another driver takes the run over.

    Raises:
        RunExistsError: the run exists and ``resume`` is "never", or the directory contains other files.
        RunInUseError: another driver works on the run.
        StorageError: there is no run to resume, or the directory cannot be written, was written by a newer drivetrain,
            or contains a symbolic link instead of one of drivetrain's files.
    """
    name = posixpath.basename(storage.root)
    resume = str(config.resume) if config.resume in _WAYS_TO_RESUME else "must"  # else the path of the run
    _check_exists(with_short_deadline(storage), name, resume)
    _refuse_links(storage)
    _refuse_special_files(storage)
    open_storage(with_short_deadline(storage))
    with contextlib.ExitStack() as stack:
        lock = RunLock(with_short_deadline(storage), notify, on_lost)
        stack.enter_context(lock.acquired())
        _sweep_drafts(storage)  # after the lock is taken: see there
        exists = _check_exists(storage, name, resume)
        record, starts = _read_record(storage)
        record.setdefault("id", secrets.token_hex(4))
        record.setdefault("created", time.time())
        record.update({key: _shortened(fact) for key, fact in facts.items()})
        record.update(
            version=VERSION,
            name=name,
            starts=starts + 1,
            drivetrain=__version__,
            python=platform.python_version(),
        )
        staged = _stage(stack, storage, record, config, notify, lock.check)
        flushed = _Flush(storage, (RUN_FILE, TRAINER_FILE), staged.push_before_commit)
        stack.callback(flushed.wait)
        checkpoints = CheckpointManager(
            storage, config.checkpoint_config, metadata, notify, lock.check, flushed.before_commit
        )
        checkpoints.create_manifest()  # before the other files, so a run without a manifest has always lost it
        last_number, resumed = 0, ""
        if exists:
            staged.pull()
            last_number, resumed = _prepare_resume(config, storage, checkpoints)
        _write_files(storage, record, trainer, lock, durable=exists)
        if not exists:
            flushed.start()
        yield OpenRun(
            name=name,
            id=record["id"],
            driver_count=record["starts"],
            last_number=last_number,
            storage=storage,
            directory=staged.directory,
            checkpoints=checkpoints,
            resumed=resumed,
            push=staged.push,
        )


def _write_files(storage: Storage, record: Mapping[str, Any], trainer: bytes, lock: RunLock, *, durable: bool) -> None:
    """Write the files that describe the run, and delete those about an earlier failure, unless the lock is lost."""
    storage.write_bytes(RUN_FILE, json.dumps(record, indent=2).encode(), durable=durable, guard=lock.check)
    lock.confirm = partial(storage.require_run, record["id"], record["starts"])
    storage.write_bytes(TRAINER_FILE, trainer, durable=durable, guard=lock.check)
    for stale in ERROR_FILES:
        lock.check()
        storage.delete(stale)


class _Flush:
    """Flushes the files of a new run to the disk in the background, because the workers need not wait for the disk.

    Before the first commit, the files must be on the disk: until then, the run has nothing that a power failure could
    make worthless.

    Args:
        storage: the run directory.
        names: the files.
        push: called before each commit.
    """

    def __init__(self, storage: Storage, names: Sequence[str], push: Callable[[], None]) -> None:
        self._storage = storage
        self._push = push
        self._thread = threading.Thread(target=self._run, args=(names,), daemon=True, name="drivetrain flush")

    def start(self) -> None:
        if self._storage.is_local:
            self._thread.start()

    def wait(self) -> None:
        """Wait until the files are on the disk, if that has begun."""
        if self._thread.ident is not None:
            self._thread.join(self._storage.limits.deadline_s)

    def before_commit(self) -> None:
        """Wait until the files are on the disk, and upload the results."""
        self.wait()
        self._push()

    def _run(self, names: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # another process has deleted the run; the commit will say so
            for name in (*names, ""):
                flush_to_disk(self._storage.path(name))


def _shortened(fact: Any) -> Any:
    is_long = isinstance(fact, str) and len(fact) > _MAX_FACT_CHARS
    return f"{fact[:_MAX_FACT_CHARS]}... ({len(fact):,} characters)" if is_long else fact


def locate_run(config: RunConfig, trainer: str) -> Storage:
    """Return the run directory, which may not exist yet. Its last component is the name of the run.

    Args:
        config: the configuration of the run.
        trainer: the name of the trainer, with which the name of a run begins that the user has not named.

    Raises:
        ConfigurationError: the path is on a storage that cannot be used.
        StorageError: ``resume`` is a path without a run.
    """
    limits = Limits(threads=config.sync_config.transfer_threads, deadline_s=config.sync_config.sync_timeout)
    if config.resume not in _WAYS_TO_RESUME:
        filesystem, root = locate(config.resume, config.storage_filesystem, what="RunConfig(resume=...)")
        storage = Storage(filesystem, root, limits)
        if not with_short_deadline(storage).exists(RUN_FILE):
            if storage.exists(LISTING_FILE):
                raise StorageError(
                    f"[DT-703] RunConfig(resume=...): expected a run directory, got the checkpoint {root}. Pass the "
                    "directory above it, or start a new run from it with resume_from_checkpoint=Checkpoint(path)"
                )
            raise StorageError(
                f"[DT-703] RunConfig(resume=...): expected a run directory with a {RUN_FILE}, got {root}"
            )
        return storage
    runs = runs_location(config.storage_path, config.storage_filesystem)
    name = config.name or f"{trainer}_{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(4)}"
    return Storage(runs.filesystem, runs.path(name), limits)


def _check_exists(storage: Storage, name: str, resume: str) -> bool:
    """Return True if the run exists. Raise an error if ``resume``, the way to resume, does not allow that result."""
    parent = posixpath.dirname(storage.root)
    exists = storage.exists(RUN_FILE)
    if resume == "must" and not exists:
        raise StorageError(f'[DT-702] RunConfig(resume="must"): expected the run {name!r} to exist in {parent}')
    if exists and resume == "never":
        raise RunExistsError(
            f"[DT-701] a run {name!r} exists in {parent} and was left unchanged. Choose another name, delete the run, "
            'or resume it with RunConfig(resume="auto") (drivetrain run: --resume auto)'
        )
    if not exists and resume == "never":
        directories, files = storage.list_names()
        if directories or any(file != LOCK_FILE for file in files):
            raise RunExistsError(
                f"[DT-701] {storage.root}: expected a new or empty run directory, got one with other files. "
                "Choose another name"
            )
    return exists


def _read_record(storage: Storage) -> tuple[dict[str, Any], int]:
    """Return the content of ``run.json`` and the number of previous drivers. For a new run, return ``({}, 0)``."""
    stored = storage.read_json(RUN_FILE)
    if stored is None:
        return {}, 0
    check_version(stored.integer("version", VERSION), stored.where)
    if not _RUN_ID.fullmatch(stored.text("id", "none")):  # the id becomes a part of paths and addresses
        found = ascii(stored.values["id"])
        raise StorageError(f"{stored.where}: expected 'id' to be 1 to 64 letters, digits, '_' or '-', got {found}")
    return stored.values, stored.integer("starts", 0)


def _refuse_special_files(storage: Storage) -> None:
    """Reject a run directory that contains a link, a named pipe or a device instead of one of drivetrain's files."""
    if not storage.is_local:
        return
    for directory in ("", LOGS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(storage.path(directory)) as entries:
            for entry in entries:
                is_usual = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                if not is_usual and (directory or is_reserved(entry.name)):
                    raise StorageError(
                        f"[DT-413] {entry.path}: expected a regular file or a directory. The run was not opened"
                    )


def _refuse_links(storage: Storage) -> None:
    """Reject a run directory with a link through which this process, a worker or a callback could write elsewhere.

    A link instead of a checkpoint's directory is allowed, because such a link is never followed.
    """
    if not storage.is_local:
        return
    logs = [f"{LOGS}/{name}" for name in storage.list_names(LOGS)[1]]
    for name in storage.list_names()[1] + logs:
        is_own = is_reserved(name) or name in logs
        link = None if CHECKPOINT_NAME_PATTERN.fullmatch(name) else storage.find_link(name)
        if link is not None and (is_own or not _is_below(link, storage.root)):
            raise StorageError(
                f"[DT-413] {link}: expected a file or directory of the run, got a symbolic link, which would let the "
                "run change files outside of its directory. Delete the link, or replace it by its target"
            )


def _is_below(path: str, directory: str) -> bool:
    """Return True if a path is below a directory after all links are resolved."""
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(directory), ""))


def _sweep_drafts(storage: Storage) -> None:
    """Delete the drafts that drivers left when they were killed while replacing a file."""
    for name in storage.list_names()[1]:
        if run_file(draft_target(name)).replaced:
            storage.delete(name)


@dataclass(frozen=True, slots=True)
class _Staged:
    """The directory for the files of callbacks.

    Attributes:
        directory: the directory.
        push: uploads its new and changed files to the run directory.
        push_before_commit: uploads what was added to metrics and logs.
        pull: continues the metrics and logs of earlier drivers.
    """

    directory: Path
    push: Callable[[], None] = lambda: None
    push_before_commit: Callable[[], None] = lambda: None
    pull: Callable[[], None] = lambda: None


def _stage(
    stack: contextlib.ExitStack,
    storage: Storage,
    record: Mapping[str, Any],
    config: RunConfig,
    notify: Callable[[str], None],
    guard: Callable[[], None],
) -> _Staged:
    """Create the directory for the files of callbacks. If the run directory is local, it is that."""
    _sweep_temporary_files()
    stack.callback(_sweep_temporary_files)
    if storage.is_local:
        directory = Path(storage.root)
        storage.call(f"create {ARTIFACTS}", lambda: directory.joinpath(ARTIFACTS).mkdir(exist_ok=True))
        return _Staged(directory)
    shared = stack.enter_context(share_directory(STAGED_RUNS, staging_key(record["id"], record["starts"])))
    directory = Path(shared, "driver")
    directory.mkdir(exist_ok=True)
    mirror = Mirror(
        str(directory),
        storage,
        "",
        period_s=config.sync_config.sync_period,
        keeps_files=True,
        warn=notify,
        guard=guard,
        driver=record["starts"],
    )
    stack.enter_context(mirror.running())
    return _Staged(directory, mirror.try_push, partial(mirror.try_push, before_commit=True), mirror.pull)


def _sweep_temporary_files() -> None:
    """Delete the files that processes on this node left when they were killed during an upload or a download."""
    with contextlib.suppress(StorageError):  # reported when a process first uses such a directory
        sweep("uploads")
        sweep("downloads")


def _prepare_resume(config: RunConfig, storage: Storage, checkpoints: CheckpointManager) -> tuple[int, str]:
    """Delete uncommitted checkpoints. Return the highest report number so far, and from where the run continues."""
    swept, last_number = checkpoints.sweep()
    latest = checkpoints.verify()
    found = f"continues from {latest.name}" if latest else "starts from the beginning, as no checkpoint was committed"
    leftovers = f" ({len(swept)} uncommitted checkpoints deleted)" if swept else ""
    resumed = f"resume={redact(os.fspath(config.resume))!r}, found {storage.root}, {found}{leftovers}"
    return max(last_number, checkpoints.last_number), resumed
