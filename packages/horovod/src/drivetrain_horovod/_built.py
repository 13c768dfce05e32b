"""How Horovod was built, found without importing it; what to do where that does not fit."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import types
from collections.abc import Mapping
from pathlib import Path

__all__ = ["BUILD", "describe", "explain", "find_build"]

BUILD = "python -m drivetrain_horovod.build"

_METADATA_NAMES = {"torch": "pytorch", "tensorflow": "tensorflow", "mxnet": "mxnet"}


def find_build() -> dict[str, str] | None:
    """The frameworks that this environment's Horovod was built for, each with its version then; None without Horovod.

    A wheel of Horovod does not tell: what it was built for is what it has a library for.
    """
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    metadata = folder / "metadata.json"
    versions = json.loads(metadata.read_text()) if metadata.is_file() else {}
    endings = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return {
        framework: str(versions.get(name, "of an unknown version"))
        for framework, name in _METADATA_NAMES.items()
        if any(file.name.endswith(endings) for file in (folder / framework).glob("mpi_lib*"))
    }


def describe(built: Mapping[str, str]) -> str:
    """That in words."""
    return " and ".join(f"{framework} {version}" for framework, version in built.items()) or "no framework"


def explain(error: BaseException) -> str | None:
    """What is wrong with this environment's Horovod if that is why an exception was raised, and how to mend it."""
    framework = _framework_of(error)
    built = find_build()
    if framework is None or built is None:
        return None
    if framework not in built:
        wanted = f"a Horovod that was built with {framework}"
    elif type(error).__name__ == "HorovodVersionMismatchError":
        wanted = f"a Horovod that was built with the {framework} that is installed"
    else:
        return None
    return f"horovod.{framework}: expected {wanted}, got one built with {describe(built)}: {_how(framework)}"


def _how(framework: str) -> str:
    if framework == "torch":
        return f"run {BUILD}"
    return f'see "Building Horovod" in the guide of drivetrain-horovod for a build with {framework}'


def _framework_of(error: BaseException) -> str | None:
    """The framework whose half of Horovod an exception is about."""
    names: list[str] = []
    if isinstance(error, AttributeError):  # horovod.torch without its library is a module that has next to nothing
        names = [error.obj.__name__] if isinstance(error.obj, types.ModuleType) else []
    elif isinstance(error, ImportError):
        trace = error.__traceback__
        while trace is not None:
            names.append(str(trace.tb_frame.f_globals.get("__name__")))
            trace = trace.tb_next
        names.append(error.name or "")
    found = (name.split(".")[1] for name in names if name.startswith("horovod."))
    return next((name for name in found if name in _METADATA_NAMES), None)
