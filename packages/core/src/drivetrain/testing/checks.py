"""Checks whose messages name the mistake. pytest does not add the values to the assertions of an installed package."""

from __future__ import annotations

__all__ = ["check_equal"]


def check_equal(what: str, found: object, expected: object) -> None:
    """Fail with a message that contains both values unless they are equal."""
    assert found == expected, f"{what}: expected {expected!r}, got {found!r}"
