"""The lock of a run directory, which ensures that only one driver at a time works on a run.

On a local filesystem with locks, the driver locks the file ``.lock``, and the kernel releases the lock when the process
exits. On any other storage, ``.lock`` is an object that the holder of the lock rewrites every few seconds (the
heartbeat). The object names the process of the holder. If that process was on the machine of a second driver and has
exited, the second driver takes the lock over at once. If that process was on another machine, the second driver watches
the object for two and a half heartbeat periods, and takes the lock over if the object does not change. Clocks of two
machines are never compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import LOCK_FILE, run_file
from drivetrain._storage.node import is_file_at, try_lock
from drivetrain._storage.reading import Fields, parse_json
from drivetrain.errors import RunInUseError, StorageError

__all__ = ["Holder", "RunLock", "find_holder"]

_BEAT_S = 5.0
_MAX_PID = 1 << 31


class RunLock:
    """The lock that a driver holds while it works on a run.

    Args:
        storage: the run directory.
        notify: called with a message before a wait for another driver's heartbeat.
        beat_s: seconds between two heartbeats on storage without locks.
    """

    def __init__(
        self, storage: Storage, notify: Callable[[str], None] = lambda line: None, *, beat_s: float = _BEAT_S
    ) -> None:
        self._storage = storage
        self._notify = notify
        self._beat_s = beat_s
        self._token = secrets.token_hex(8)
        self._lost = ""

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Acquire the lock, and release it at the end of a ``with`` block.

        Raises:
            RunInUseError: another driver holds the lock. The message names the process of that driver.
        """
        if self._storage.is_local:
            try:
                with self._hold_file():
                    yield
                return
            except _NoLocks:
                pass
        with self._hold_object():
            yield

    def check(self) -> None:
        """Check that this driver still holds the lock.

        Raises:
            RunInUseError: another driver has taken the lock over.
        """
        if self._lost:
            raise RunInUseError(f"[DT-705] the run directory {self._storage.root} has been taken over by {self._lost}")

    @contextlib.contextmanager
    def _hold_file(self) -> Iterator[None]:
        path = self._storage.path(LOCK_FILE)
        while True:
            descriptor = _open(path)
            try:
                if not try_lock(descriptor, fcntl.LOCK_EX):
                    raise self._in_use(os.pread(descriptor, 4096, 0))
                if is_file_at(descriptor, path):
                    break
            except OSError as error:
                os.close(descriptor)
                raise _NoLocks from error
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        _locked_descriptors.add(descriptor)
        try:
            self._storage.call(f"write {LOCK_FILE}", lambda: _rewrite(descriptor, self._facts(0)))
            yield
        finally:
            if descriptor in _locked_descriptors:
                _locked_descriptors.remove(descriptor)
                with contextlib.suppress(OSError):  # closing the descriptor releases the lock anyway
                    os.unlink(path)
                os.close(descriptor)

    @contextlib.contextmanager
    def _hold_object(self) -> Iterator[None]:
        held = self._storage.read_bytes(LOCK_FILE)
        if held:
            self._wait_for_release(held)
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True, name="drivetrain run lock")
        _held_tokens.add(self._token)
        try:
            self._storage.write_bytes(LOCK_FILE, self._facts(0))
            self._require(self._storage.read_bytes(LOCK_FILE))
            thread.start()
            yield
        finally:
            try:
                ended.set()
                if thread.ident is not None:
                    thread.join(self._beat_s)
                if not self._lost:
                    self._delete_object()
            finally:
                _held_tokens.discard(self._token)

    def _delete_object(self) -> None:
        """Delete the lock object, if it is this lock's."""
        with contextlib.suppress(StorageError):
            found = self._storage.read_bytes(LOCK_FILE)
            if found and _parse(found).get("token") == self._token:
                self._storage.delete(LOCK_FILE)

    def _wait_for_release(self, held: bytes) -> None:
        holder = _parse(held)
        if holder.get("machine") == _machine():
            is_left_over = holder.get("pid") == os.getpid() and holder.get("token") not in _held_tokens
            if _is_running(holder) and not is_left_over:
                raise self._in_use(held)
            return
        patience = 2.5 * self._beat_s
        self._notify(f"the run is locked by {_describe(holder)}: waiting {patience:g} s for a heartbeat")
        deadline = time.monotonic() + patience
        while (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, self._beat_s / 4))  # polled, because an object store sends no notifications
            found = self._storage.read_bytes(LOCK_FILE)
            if not found:
                return
            if found != held:
                raise self._in_use(found)

    def _beat(self, ended: threading.Event) -> None:
        beat = 0
        while not ended.wait(self._beat_s):
            beat += 1
            with contextlib.suppress(StorageError, OSError):  # the network may be down, or descriptors may run out
                found = self._storage.read_bytes(LOCK_FILE)
                if found and _parse(found).get("token") != self._token:
                    self._lost = _describe(_parse(found))
                    return
                self._storage.write_bytes(LOCK_FILE, self._facts(beat))

    def _require(self, found: bytes | None) -> None:
        if found and _parse(found).get("token") != self._token:
            raise self._in_use(found)

    def _in_use(self, held: bytes) -> RunInUseError:
        return RunInUseError(
            f"[DT-704] the run in {self._storage.root} is in use by {_describe(_parse(held))}. Wait for it, "
            "end it, or choose another name"
        )

    def _facts(self, beat: int) -> bytes:
        facts = {
            "token": self._token,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "beat": beat,
        }
        return json.dumps(facts).encode()


def _rewrite(descriptor: int, data: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)


def _open(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags, run_file(LOCK_FILE).mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise StorageError(f"{path}: expected a regular file, got something else. Delete it") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageError(
                f"{path} cannot be written ({error.strerror}). Correct its permissions, or choose another run directory"
            ) from error
        raise


_held_tokens: set[str] = set()
"""The tokens of the lock objects that this process holds. It may have left others, if a request ended too late."""

_locked_descriptors: set[int] = set()
"""The descriptors of the files that this process has locked. A forked child closes them, so it keeps no run locked."""


def _close_locked_descriptors() -> None:
    while _locked_descriptors:
        os.close(_locked_descriptors.pop())


os.register_at_fork(after_in_child=_close_locked_descriptors)


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
    held = storage.read_bytes(LOCK_FILE)
    if not held or "pid" not in (facts := _parse(held)):
        return None
    if facts.get("machine") != _machine():
        return Holder(_describe(facts), is_certain=False)
    return Holder(_describe(facts), is_certain=True) if _is_running(facts) else None


class _NoLocks(Exception):
    """The filesystem does not support locks."""


def _parse(data: bytes) -> dict[str, Any]:
    """Parse the content of a lock file, which describes the holder of the lock. Return {} if it is damaged."""
    try:
        facts = Fields(parse_json(data, LOCK_FILE), LOCK_FILE)
        if not 0 < facts.integer("pid") < _MAX_PID:
            return {}
        facts.text("host")
        facts.text("since")
        return facts.values
    except StorageError:
        return {}


def _describe(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "another process"
    return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"


def _machine() -> str:
    """Return an id of this machine's current boot and of this process's PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks since the boot, or None if the process is not running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_running(holder: dict[str, Any]) -> bool:
    started = _started(int(holder["pid"]))
    return started is not None and started == holder.get("started")
