"""Directories that processes of one node share temporarily: downloads, and files that wait for their upload.

A process that uses a shared directory holds a shared lock on a file next to that directory. The last process deletes
the directory. The kernel releases the locks of a killed process, so the next process finds that process's directories
unlocked and deletes them.

The shared directories are in the system's temporary directory, to which all users of the node can write. They are
created with mode 0700, whatever the umask is. A shared directory that belongs to another user, or that other users can
write to, is refused, because its content may have been replaced. A temporary directory that belongs to another user is
refused too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

from drivetrain._storage.layout import require_relative
from drivetrain.errors import StorageError

__all__ = ["is_file_at", "machine_directory", "private_directory", "share_directory", "sweep", "try_lock"]

_LOCK = ".lock"
_READY = ".ready"
_LEAVING = ".leaving"
_RETRY_S = 0.02
_TEMPORARY = "/tmp"
"""The temporary directory of the machine. Unlike that of ``tempfile``, it is the same for all processes of a user."""

_warned: set[str] = set()


@contextlib.contextmanager
def share_directory(
    kind: str,
    key: str,
    *,
    fill: Callable[[str], None] | None = None,
    before_deletion: Callable[[str], None] | None = None,
    wait_s: float = 1800.0,
) -> Iterator[str]:
    """Share a local directory with all processes of this user on this node that request the same kind and key.

    The path of the directory is the value of the ``with`` statement.

    Args:
        kind: the purpose of the directory, such as ``"downloads"``.
        key: the name of the directory.
        fill: fills the empty directory, whose path is its argument. One process calls it while the others wait.
        before_deletion: called with the path by the last process that uses the directory, before it deletes the
            directory.
        wait_s: seconds to wait for another process to fill the directory.

    Raises:
        StorageError: the wait timed out, the key contains a slash, or other users can write to the shared directories
            of this user.
    """
    if "/" in require_relative(key, "the key of a shared directory"):
        raise StorageError(f"the key of a shared directory: expected a name without slashes, got {key!r}")
    base = _base(kind)
    sweep(kind)
    descriptor = _enter(os.path.join(base, key), fill, wait_s)
    try:
        yield os.path.join(base, key)
    finally:
        _leave(os.path.join(base, key), descriptor, before_deletion)


def sweep(kind: str) -> None:
    """Delete the directories of a kind that no running process uses any more."""
    if not os.path.isdir(_directory_of(kind)):
        return
    base = _base(kind)
    abandoned: list[tuple[str, int]] = []
    with _leaving_lock(base, fcntl.LOCK_EX | fcntl.LOCK_NB) as has_lock:
        names = [name for name in os.listdir(base) if name.endswith(_LOCK)] if has_lock else []
        for name in names:
            with contextlib.suppress(OSError):
                descriptor = os.open(os.path.join(base, name), os.O_RDWR | os.O_CLOEXEC)
                if try_lock(descriptor, fcntl.LOCK_EX):
                    abandoned.append((os.path.join(base, name.removesuffix(_LOCK)), descriptor))
                else:
                    os.close(descriptor)
    for path, descriptor in abandoned:
        try:
            with contextlib.suppress(OSError):
                if is_file_at(descriptor, path + _LOCK):
                    _delete(path)
        finally:
            os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Take ``fcntl.LOCK_SH`` or ``LOCK_EX`` on an open file without waiting, and return True on success."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_file_at(descriptor: int, path: str) -> bool:
    """Return True if the file at a path is still the one that a descriptor refers to."""
    try:
        at_path, opened = os.stat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)


def machine_directory(kind: str) -> str:
    """Return a private directory that all processes of this user on this machine share. Create it if necessary.

    Args:
        kind: the purpose of the directory, which is its name.

    Raises:
        StorageError: other users can write to the directory.
    """
    is_usable = os.access(_TEMPORARY, os.W_OK | os.X_OK)
    return _base(kind, _TEMPORARY if is_usable else tempfile.gettempdir())


def _directory_of(kind: str, temporary: str | None = None) -> str:
    return os.path.join(temporary or tempfile.gettempdir(), f"drivetrain-{os.getuid()}-private", kind)


def _base(kind: str, temporary: str | None = None) -> str:
    base = _directory_of(kind, temporary)
    _require_safe_parent(os.path.dirname(os.path.dirname(base)))
    private_directory(os.path.dirname(base))
    private_directory(base)
    return base


def _require_safe_parent(path: str) -> None:
    """Refuse a temporary directory that belongs to another user, who could replace this user's directory in it.

    Warn once per process if other users can write to the temporary directory and it has no sticky bit, because these
    users could replace this user's directory as well. This is not an error, because a volume of a container is often
    such a directory, and only root can change that. Members of this user's own primary group are trusted: with a umask
    of 002, a user's directories are group-writable. Members of the group root are trusted too.

    Args:
        path: the temporary directory.

    Raises:
        StorageError: the owner of the temporary directory is neither root nor this user.
    """
    status = os.stat(path)
    if status.st_uid not in (0, os.getuid()):
        raise StorageError(
            f"[DT-415] {path}: expected a temporary directory of user {os.getuid()} or of root, got one of user "
            f"{status.st_uid}. Set TMPDIR to your own directory with mode 0700"
        )
    others_can_write = status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and status.st_gid not in (0, os.getegid())
    )
    if others_can_write and not status.st_mode & stat.S_ISVTX and path not in _warned:
        _warned.add(path)
        private = shlex.quote(os.path.join(path, f"tmp-{os.getuid()}"))
        warnings.warn(
            f"[DT-415] {path}: expected a temporary directory that no other user can write to, or one with the sticky "
            f"bit, got {stat.filemode(status.st_mode)}. Other users of this node may be able to replace files of your "
            f"runs. Set TMPDIR to your own directory with mode 0700: mkdir -m 700 {private} && export TMPDIR={private}",
            stacklevel=2,
        )


def private_directory(path: str) -> str:
    """Create a directory that only this user can use, if it does not exist, and return its path.

    Raises:
        StorageError: the path exists, and is not a directory, belongs to another user, or is writable by other users.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    others_can_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or others_can_write:
        raise StorageError(
            f"[DT-415] {path}: expected a directory of user {os.getuid()} that no other user can write to, got "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}. Delete it, or set TMPDIR to your own directory "
            "with mode 0700"
        )
    return path


def _enter(path: str, fill: Callable[[str], None] | None, wait_s: float) -> int:
    """Take the shared lock of a directory, and return the lock file's descriptor. Fill the directory if necessary."""
    deadline = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path + _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(descriptor, fcntl.LOCK_SH) and is_file_at(descriptor, path + _LOCK):
                if os.path.exists(path + _READY):
                    keep, descriptor = descriptor, -1
                    return keep
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                if try_lock(descriptor, fcntl.LOCK_EX) and is_file_at(descriptor, path + _LOCK):
                    _make_ready(path, fill, descriptor)
                    continue  # the exclusive lock cannot become a shared one atomically
            holder = os.pread(descriptor, 100, 0).decode(errors="replace") or "another process"
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if time.monotonic() > deadline:
            raise StorageError(f"{path}: expected {holder} on this node to fill the directory within {wait_s:g} s")
        time.sleep(_RETRY_S)


def _make_ready(path: str, fill: Callable[[str], None] | None, descriptor: int) -> None:
    if os.path.exists(path + _READY):
        return
    shutil.rmtree(path, ignore_errors=True)  # the incomplete files of a killed process
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
    os.mkdir(path, 0o700)
    if fill is not None:
        fill(path)
    os.close(os.open(path + _READY, os.O_WRONLY | os.O_CREAT, 0o600))


def _leave(path: str, descriptor: int, before_deletion: Callable[[str], None] | None) -> None:
    """Release this process's lock on a directory, and delete the directory if no other process holds a lock on it."""
    try:
        with _leaving_lock(os.path.dirname(path), fcntl.LOCK_SH):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # releases it even if a forked child has inherited the descriptor
            is_last = try_lock(descriptor, fcntl.LOCK_EX)
        if is_last and is_file_at(descriptor, path + _LOCK):
            if before_deletion is not None:
                before_deletion(path)
            _delete(path)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _leaving_lock(base: str, kind: int) -> Iterator[bool]:
    """Lock the ``.leaving`` file, so that no sweep happens while a process is leaving a directory of this kind.

    A leaving process releases its shared lock, and then takes the exclusive lock. In between, a sweep could take the
    directory for an abandoned one, and delete it without a call of ``before_deletion``.

    Args:
        base: the parent of the directories of this kind.
        kind: ``LOCK_SH`` for a leaving process; ``LOCK_EX | LOCK_NB`` for a sweep.

    Yields:
        True if the ``.leaving`` file was locked. It can be False only with ``LOCK_NB``.
    """
    descriptor = os.open(base + _LEAVING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, kind)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _delete(path: str) -> None:
    """Delete a directory whose exclusive lock this process holds."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + _READY)
    shutil.rmtree(path, ignore_errors=True)
    os.unlink(path + _LOCK)
