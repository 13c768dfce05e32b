"""Determines how Horovod was built, without importing it, and explains errors that the build causes."""

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
    """Return the frameworks that Horovod was built for, with their versions, or None if Horovod is not installed.

    The metadata of a Horovod wheel does not list these frameworks. A framework is one of them if the installed package
    contains a library for it.

    Returns:
        A mapping from the names of the frameworks to their versions.
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
    """Return a description of a build for error messages."""
    return " and ".join(f"{framework} {version}" for framework, version in built.items()) or "no framework"


def explain(error: BaseException) -> str | None:
    """Return how the installed Horovod caused an exception and how to fix this, or None if it is not the cause."""
    framework = _framework_of(error)
    built = find_build()
    if framework is None or built is None:
        return None
    if framework not in built:
        expected = f"a Horovod that was built with {framework}"
    elif type(error).__name__ == "HorovodVersionMismatchError":
        expected = f"a Horovod that was built with the installed version of {framework}"
    else:
        return None
    return f"horovod.{framework}: expected {expected}, got one built with {describe(built)}. {_remedy(framework)}"


def _remedy(framework: str) -> str:
    if framework == "torch":
        return f"Run: {BUILD}"
    return f'See "Building Horovod" in the guide of drivetrain-horovod for a build with {framework}'


def _framework_of(error: BaseException) -> str | None:
    """Return the framework whose part of Horovod raised an exception, or None if Horovod did not raise it."""
    names: list[str] = []
    if isinstance(error, AttributeError):  # without its library, horovod.torch is an almost empty module
        names = [error.obj.__name__] if isinstance(error.obj, types.ModuleType) else []
    elif isinstance(error, ImportError):
        trace = error.__traceback__
        while trace is not None:
            names.append(str(trace.tb_frame.f_globals.get("__name__")))
            trace = trace.tb_next
        names.append(error.name or "")
    parts = (name.split(".")[1] for name in names if name.startswith("horovod."))
    return next((name for name in parts if name in _METADATA_NAMES), None)
