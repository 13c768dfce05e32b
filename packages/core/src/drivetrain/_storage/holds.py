"""Prevents the deletion of a committed local checkpoint while a process reads it.

A reader holds a shared lock on the listing file of the checkpoint, and a deletion takes an exclusive lock on it. The
kernel releases the locks of a process that dies. Remote checkpoints are never locked, because readers copy them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import LISTING_FILE
from drivetrain._storage.node import try_lock
from drivetrain.errors import StorageError

__all__ = ["delete_unless_held", "hold", "is_held"]

_HOLD_WAIT_S = 60.0
_RETRY_S = 0.05


@contextlib.contextmanager
def hold(storage: Storage) -> Iterator[None]:
    """Prevent the deletion of a checkpoint during a ``with`` block.

    Args:
        storage: the directory of the checkpoint. An uncommitted checkpoint is not locked, because only its owner would
            delete it.

    Raises:
        StorageError: another process has held an exclusive lock for a minute.
    """
    path = storage.path(LISTING_FILE)
    descriptor = _open(path, os.O_RDONLY)
    try:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the filesystem does not support locks
                _wait_for_lock(descriptor, path)
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _wait_for_lock(descriptor: int, path: str) -> None:
    """Wait for the shared lock. A deletion, or any process that can read the file, may hold the exclusive lock."""
    deadline = time.monotonic() + _HOLD_WAIT_S
    while not try_lock(descriptor, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            raise StorageError(
                f"{path}: expected to get a shared lock within {_HOLD_WAIT_S:g} s, but another process holds an "
                "exclusive one: it deletes the checkpoint, or blocks it. To find that process, run: lslocks"
            )
        time.sleep(_RETRY_S)


def is_held(storage: Storage, name: str) -> bool:
    """Return True if a process holds the checkpoint in the directory ``name``."""
    with _locked_for_deletion(storage, name) as locked:
        return not locked


def delete_unless_held(storage: Storage, name: str) -> bool:
    """Delete the checkpoint in the directory ``name``, unless a process holds it.

    Returns:
        True if the checkpoint was deleted.
    """
    with _locked_for_deletion(storage, name) as locked:
        if locked:
            storage.delete(name)
        return locked


@contextlib.contextmanager
def _locked_for_deletion(storage: Storage, name: str) -> Iterator[bool]:
    is_link = storage.find_link(name) is not None  # only the link would be deleted, and a link is never held
    descriptor = _open(storage.path(name, LISTING_FILE), os.O_RDWR) if storage.is_local and not is_link else None
    try:
        locked = True
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the filesystem does not support locks
                locked = try_lock(descriptor, fcntl.LOCK_EX)
        yield locked
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
