"""Descriptors of locked files, which a forked child must close: otherwise it would keep the locks of its parent."""

from __future__ import annotations

import os

__all__ = ["close_in_children", "close_locked"]

_locked: set[int] = set()


def close_in_children(descriptor: int) -> None:
    """Make every process that is forked from this one close a descriptor at once."""
    _locked.add(descriptor)


def close_locked(descriptor: int) -> None:
    """Close a descriptor that was passed to :func:`close_in_children`, unless this process was forked after that."""
    if descriptor in _locked:
        _locked.remove(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=_close_all)
