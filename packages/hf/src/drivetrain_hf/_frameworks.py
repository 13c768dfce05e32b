"""Looks whether a framework is installed, before it is imported."""

from __future__ import annotations

import importlib.util

from drivetrain import PluginError

__all__ = ["require"]


def require(framework: str) -> None:
    """Refuses to go on without a framework.

    Args:
        framework: ``"transformers"``, ``"accelerate"`` or ``"deepspeed"``: the name of the package, and of the extra.

    Raises:
        PluginError: it is not installed here.
    """
    if importlib.util.find_spec(framework) is None:
        raise PluginError(
            f"drivetrain_hf.{framework}: expected the package {framework}, found none: run "
            f'pip install "drivetrain[{framework}]"'
        )
