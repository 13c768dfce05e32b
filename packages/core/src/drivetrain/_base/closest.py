"""Finds the name that was meant, for errors about unknown names."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["closest"]


def closest(name: str, names: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """Return the most similar of some names; None if none is similar enough.

    Args:
        name: the name that was given.
        names: the names that exist.
        similarity: the minimum similarity, from 0 to 1.
    """
    import difflib  # rarely needed, and slow to import

    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=similarity)), None)
