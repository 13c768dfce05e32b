"""Functions that all kits use. Workers import this module, so it does not import pytest."""

from __future__ import annotations

import os

__all__ = ["check_equal", "forget_test_name"]


def check_equal(what: str, found: object, expected: object) -> None:
    """Fail unless two values are equal.

    The message contains both, because pytest does not add them to the assertions of an installed package.
    """
    assert found == expected, f"{what}: expected {expected!r}, got {found!r}"


def forget_test_name() -> None:
    """Remove an environment variable of pytest that differs between tests.

    Workers inherit the environment, so each change of the variable would make the local runtime preload modules again.
    """
    os.environ.pop("PYTEST_CURRENT_TEST", None)
