"""The lock of a run directory, which ensures that only one driver at a time works on a run.

The holder of the lock rewrites the file ``.lock`` every few seconds (the heartbeat). The file names the process of the
holder, and contains a token that only the holder knows: the **fencing token**. A second driver takes the lock over if

- the holder was on this machine and its process has exited, or
- the holder was on another machine, and the file has not changed for two and a half heartbeat periods.

Clocks of two machines are never compared. On a filesystem with locks, the holder also locks the file, and the kernel
releases the lock when the process exits. That lock alone does not suffice: on some network filesystems it is only valid
on one node, so that two nodes could lock the same file. There, a driver that takes the lock over creates a new file, so
that a late heartbeat of the former holder, which is written to the file that it has opened, cannot bring it back.

A driver that was suspended, or cut off from the storage, may have lost the lock without noticing. So it checks the lock
before each commit (:meth:`RunLock.check`). The check costs nothing as long as the last heartbeat is so recent that no
other driver can have taken the lock over. Otherwise it reads the token.

A driver may even be suspended between this check and the commit, which renames a draft to the manifest. A driver that
takes a run over first deletes all drafts, and then reads the manifest. So the rename happens before the manifest is
read, or it fails. An object store has no drafts: there, a put that began before the suspension may still arrive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from drivetrain._base.descriptors import close_in_children, close_locked
from drivetrain._storage.directory import Storage
from drivetrain._storage.holder import boot_id, describe, is_on_this_machine, is_running, own_facts, parse
from drivetrain._storage.layout import LOCK_FILE, run_file
from drivetrain._storage.node import is_file_at, try_lock
from drivetrain.errors import RunInUseError, StorageError

__all__ = ["Holder", "RunLock", "find_holder"]

_BEAT_S = 5.0
_LEASE_BEATS = 2.0
"""The number of heartbeat periods for which a holder need not check whether it still holds the lock."""

_EMPTY_WAIT_S = 0.5
"""Seconds to wait for the content of a file that another driver may have just created."""

_PATIENCE_BEATS = 2.5
"""The number of heartbeat periods for which the file must not change before a driver of another machine takes it."""

_FILE_BYTES = 1024
"""The size of a locked file. It is constant, so that a heartbeat is a single write."""


class RunLock:
    """The lock that a driver holds while it works on a run.

    Args:
        storage: the run directory.
        notify: called with a message before a wait for another driver's heartbeat.
        on_lost: called with the error that :meth:`check` raises from now on, on another thread, as soon as this driver
            notices that another driver has taken the lock over.
        beat_s: seconds between two heartbeats.

    Attributes:
        confirm: called if the holder cannot be sure by the token alone, because a heartbeat has come late. It raises a
            RunInUseError if another driver has worked on the run.
    """

    def __init__(
        self,
        storage: Storage,
        notify: Callable[[str], None] = lambda line: None,
        on_lost: Callable[[RunInUseError], None] = lambda error: None,
        *,
        beat_s: float = _BEAT_S,
    ) -> None:
        self._storage = storage
        self._notify = notify
        self._on_lost = on_lost
        self._beat_s = beat_s
        self._facts = {"token": secrets.token_hex(8), **own_facts()}
        self._beaten_at = _NEVER  # when the last successful heartbeat began
        self._beats = 0
        self._lost = ""
        self._place: _Object | _LockedFile = _Object(storage)
        self.confirm: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Acquire the lock, and release it at the end of a ``with`` block.

        Raises:
            RunInUseError: another driver holds the lock. The message names the process of that driver.
        """
        with contextlib.ExitStack() as stack:
            self._place = self._acquire(stack)
            ended = threading.Event()
            thread = threading.Thread(target=self._beat_until, args=(ended,), daemon=True, name="drivetrain run lock")
            thread.start()
            stack.callback(thread.join, self._beat_s)
            stack.callback(ended.set)
            yield

    def check(self) -> None:
        """Check that this driver still holds the lock.

        Raises:
            RunInUseError: another driver has taken the lock over.
            StorageError: the storage cannot be read.
        """
        if not self._lost and self._has_lapsed():
            self._require_own(self._place.read())
            if not self._lost:
                self.confirm()
        if self._lost:
            raise self._taken_over()

    def _acquire(self, stack: contextlib.ExitStack) -> _Object | _LockedFile:
        """Take the lock, and register its release."""
        while True:
            with contextlib.ExitStack() as attempt:
                place = self._open(attempt)
                held = place.read() if place.is_current() else None
                if held:
                    self._wait_for_release(place, held)
                if not place.is_current():  # the previous holder has deleted the file
                    continue
                if not place.make_own(held):
                    continue
                token = self._facts["token"]
                _held_tokens.add(token)
                attempt.callback(_held_tokens.discard, token)
                attempt.callback(self._release, place)
                began = time.monotonic()
                self._beat(place)
                self._require_only(place.read())
                if not place.is_exclusive:  # another driver may have read the storage before this one wrote
                    time.sleep(2 * (time.monotonic() - began))
                    self._require_only(place.read())
                stack.push(attempt.pop_all())
                return place

    def _open(self, attempt: contextlib.ExitStack) -> _Object | _LockedFile:
        if self._storage.is_local:
            try:
                return attempt.enter_context(self._locked_file())
            except _NoLocks:
                pass
        return _Object(self._storage)

    def _require_only(self, found: bytes | None) -> None:
        if found and parse(found, LOCK_FILE).get("token") != self._facts["token"]:
            raise self._in_use(found)

    @contextlib.contextmanager
    def _locked_file(self) -> Iterator[_LockedFile]:
        path = self._storage.path(LOCK_FILE)
        descriptor, is_new = _open(path)
        close_in_children(descriptor)
        try:
            try:
                is_locked = try_lock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise _NoLocks from error
            if not is_locked:
                raise self._in_use(os.pread(descriptor, 4096, 0))
            yield _LockedFile(self._storage, path, descriptor, is_new=is_new)
        finally:
            close_locked(descriptor)

    def _wait_for_release(self, place: _Object | _LockedFile, held: bytes) -> None:
        """Return if the holder has exited, has released the lock, or shows no heartbeat; else raise an error."""
        holder = parse(held, LOCK_FILE)
        if place.is_exclusive and (not holder or boot_id(holder) == boot_id(own_facts())):
            return  # the kernel has released the lock of the holder
        if is_on_this_machine(holder):
            is_left_over = holder.get("pid") == os.getpid() and holder.get("token") not in _held_tokens
            if is_running(holder) and not is_left_over:
                raise self._in_use(held)
            return
        patience = _PATIENCE_BEATS * self._beat_s
        self._notify(f"the run is locked by {describe(holder)}: waiting {patience:g} s for a heartbeat")
        deadline = time.monotonic() + patience
        while (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, self._beat_s / 4))  # polled, because storage sends no notifications
            found = place.read()
            if not found:
                return
            if found != held:
                raise self._in_use(found)

    def _beat_until(self, ended: threading.Event) -> None:
        place = self._place
        with contextlib.suppress(OSError):
            place.flush()
        while not ended.wait(self._beat_s):
            with contextlib.suppress(StorageError, OSError):  # the network may be down, or descriptors may run out
                began, has_lapsed = _Moment.now(), self._has_lapsed()
                found = place.read()
                if found is not None or has_lapsed:
                    self._require_own(found)
                if not self._lost:
                    self._beat(place)
                    place.flush()
                    is_late = _Moment.now().seconds_after(began) > self._beat_s / 2
                    if has_lapsed or is_late:  # another driver may have come between the read and the write
                        self._confirm_or_lose()
                if self._lost:
                    self._on_lost(self._taken_over())
                    return

    def _confirm_or_lose(self) -> None:
        try:
            self.confirm()
        except RunInUseError:
            self._lost = "another driver"
        except StorageError:
            self._beaten_at = _NEVER  # so the next check asks again

    def _beat(self, place: _Object | _LockedFile) -> None:
        began = _Moment.now()
        place.write(json.dumps({**self._facts, "beat": self._beats}).encode())
        self._beats += 1
        self._beaten_at = began

    def _has_lapsed(self) -> bool:
        return _Moment.now().seconds_after(self._beaten_at) > _LEASE_BEATS * self._beat_s

    def _require_own(self, found: bytes | None) -> None:
        """Note that the lock is lost if the token is another one. A missing file means: to a driver that has ended."""
        holder = parse(found, LOCK_FILE)
        if holder.get("token") != self._facts["token"]:
            self._lost = describe(holder) if found else "another driver, which has ended"

    def _release(self, place: _Object | _LockedFile) -> None:
        """Delete the file, if it is this lock's. A process that was forked from the driver does not."""
        if self._lost or os.getpid() != self._facts["pid"]:
            return
        with contextlib.suppress(StorageError, OSError):
            if parse(place.read(), LOCK_FILE).get("token") == self._facts["token"]:
                place.delete()

    def _taken_over(self) -> RunInUseError:
        return RunInUseError(f"[DT-705] the run directory {self._storage.root} has been taken over by {self._lost}")

    def _in_use(self, held: bytes) -> RunInUseError:
        return RunInUseError(
            f"[DT-704] the run in {self._storage.root} is in use by {describe(parse(held, LOCK_FILE))}. Wait for it, "
            "end it, or choose another name"
        )


class _Object:
    """The file ``.lock`` on a storage without locks, which is replaced as a whole."""

    is_exclusive = False

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def read(self) -> bytes | None:
        return self._storage.read_bytes(LOCK_FILE)

    def write(self, data: bytes) -> None:
        self._storage.write_bytes(LOCK_FILE, data)

    def delete(self) -> None:
        self._storage.delete(LOCK_FILE)

    def is_current(self) -> bool:
        return True

    def make_own(self, held: bytes | None) -> bool:
        return True

    def flush(self) -> None:
        pass


class _LockedFile:
    """The file ``.lock`` on a filesystem with locks, which this process has locked.

    Args:
        storage: the run directory.
        path: the path of the file.
        descriptor: the locked descriptor. All writes go to it, so that they never reach the file of another driver.
        is_new: True if this process has created the file. Only one process can do that, also on a network filesystem.
    """

    is_exclusive = True

    def __init__(self, storage: Storage, path: str, descriptor: int, *, is_new: bool) -> None:
        self._storage = storage
        self._path = path
        self._descriptor = descriptor
        self._is_new = is_new

    def read(self) -> bytes | None:
        """Return the content of the file that has the path now.

        It is opened again, because NFS compares its cache with the server only when a file is opened. On SMB, only the
        locked descriptor can read it.
        """
        try:
            return self._storage.read_bytes(LOCK_FILE)
        except StorageError:
            if not self.is_current():
                raise
            return os.pread(self._descriptor, _FILE_BYTES, 0)

    def write(self, data: bytes) -> None:
        def write() -> None:
            os.pwrite(self._descriptor, data.ljust(_FILE_BYTES), 0)
            os.ftruncate(self._descriptor, _FILE_BYTES)

        self._storage.call(f"write {LOCK_FILE}", write)

    def flush(self) -> None:
        """Send what was written to the server of a network filesystem, where other nodes read it."""
        os.fdatasync(self._descriptor)

    def delete(self) -> None:
        os.unlink(self._path)

    def is_current(self) -> bool:
        return is_file_at(self._descriptor, self._path)

    def make_own(self, held: bytes | None) -> bool:
        """Return True if no other node can write to the file. Otherwise delete it, so that a new one can be created."""
        holder = parse(held, LOCK_FILE)
        if self._is_new or (holder and boot_id(holder) == boot_id(own_facts())):
            return True
        if not held:  # another node may have created the file, and not written to it yet
            time.sleep(_EMPTY_WAIT_S)
            if self.read():
                return False
        if self.is_current():
            os.unlink(self._path)
        return False


class _Moment(NamedTuple):
    """A point in time, on a clock that also runs while the machine sleeps, and on the clock of the calendar.

    The latter also runs while a virtual machine is paused. If someone sets it, the lock is checked once too often.
    """

    since_boot: float
    calendar: float

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    def seconds_after(self, earlier: _Moment) -> float:
        """Return the longer time of both clocks."""
        return max(self.since_boot - earlier.since_boot, self.calendar - earlier.calendar)


_NEVER = _Moment(-float("inf"), -float("inf"))


def _open(path: str) -> tuple[int, bool]:
    """Open the file, and return its descriptor, and whether it was created."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    mode = run_file(LOCK_FILE).mode
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, mode), True
        return os.open(path, flags | os.O_CREAT, mode), False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise StorageError(f"{path}: expected a regular file, got something else. Delete it") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageError(
                f"{path} cannot be written ({error.strerror}). Correct its permissions, or choose another run directory"
            ) from error
        raise


_held_tokens: set[str] = set()
"""The tokens of the locks that this process holds. It may have left other objects, if a request ended too late."""


class Holder(NamedTuple):
    """The driver that holds the lock of a run.

    Attributes:
        description: the process of the driver, as text for messages.
        is_certain: True if the driver is running on this machine. False if it is on another machine, where it may have
            died.
    """

    description: str
    is_certain: bool


def find_holder(storage: Storage) -> Holder | None:
    """Return the driver that holds the lock of a run, or None. This function does not take the lock."""
    facts = parse(storage.read_bytes(LOCK_FILE), LOCK_FILE)
    if not facts:
        return None
    if not is_on_this_machine(facts):
        return Holder(describe(facts), is_certain=False)
    return Holder(describe(facts), is_certain=True) if is_running(facts) else None


class _NoLocks(Exception):
    """The filesystem does not support locks."""
