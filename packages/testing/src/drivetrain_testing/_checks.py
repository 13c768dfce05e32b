"""Functions that all kits use. Workers import this module, so it does not import pytest."""

from __future__ import annotations

import os
import sys

from drivetrain.plugin.backends import run_python

__all__ = ["check_equal", "find_heavy_imports", "forget_test_name"]

_HEAVY = "jax lightning matplotlib mlflow numpy optuna pandas pyarrow ray sklearn tensorflow torch transformers wandb"
_IMPORTS = """
import sys
from drivetrain.plugin import load_plugin
sys.path[:0] = sys.argv[4:]
load_plugin(*sys.argv[1:3])
print("imported:", *sorted(set(sys.argv[3].split()) & sys.modules.keys()))
"""


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


def find_heavy_imports(kind: str, name: str) -> str:
    """Return ``"imported:"`` and the frameworks that loading a plugin imports, in a process of its own."""
    return run_python(_IMPORTS, kind, name, _HEAVY, *sys.path)
