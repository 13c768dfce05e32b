"""Checks that a framework is installed, before other modules import it."""

from __future__ import annotations

import importlib.util

from drivetrain import PluginError

__all__ = ["require"]


def require(framework: str) -> None:
    """Check that a framework is installed.

    Args:
        framework: ``"transformers"``, ``"accelerate"`` or ``"deepspeed"``: the name of the package, and also of
            drivetrain's extra that installs it.

    Raises:
        PluginError: the framework is not installed in this environment.
    """
    if importlib.util.find_spec(framework) is None:
        raise PluginError(
            f"drivetrain_hf.{framework} requires {framework}, which is not installed. "
            f'Run: pip install "drivetrain[{framework}]"'
        )
