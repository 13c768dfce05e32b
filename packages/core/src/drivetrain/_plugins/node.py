"""Facts about the machine of a process that may differ between the nodes of a run: versions, and models of GPUs."""

from __future__ import annotations

import contextlib
import functools
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain._plugins.frameworks import installed_frameworks
from drivetrain._version import __version__

__all__ = ["BUILDS", "differing_versions", "gpu_driver", "gpu_models", "names_of_gpus", "own_versions"]

BUILDS = ("", "-cpu", "-gpu")
"""The endings of the names under which the builds of a framework are published."""

_NVIDIA = Path("/proc/driver/nvidia")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+(\.\d+)?")
_LOCAL_LABEL = re.compile(r"\+.*")


@functools.cache
def own_versions(nvidia: Path = _NVIDIA) -> Mapping[str, str]:
    """Return the versions of Python, drivetrain, the frameworks with a plugin, and the driver of the GPUs, by name."""
    from importlib.metadata import PackageNotFoundError, version  # at the top, it would delay the start of every run

    versions = {"Python": platform.python_version(), "drivetrain": __version__}
    for name in installed_frameworks():
        for build in BUILDS:
            with contextlib.suppress(PackageNotFoundError):
                versions[name] = version(f"{name}{build}")
                break
    if driver := gpu_driver(nvidia):
        versions["NVIDIA driver"] = driver
    return versions


def gpu_driver(nvidia: Path = _NVIDIA) -> str:
    """Return the version of the driver of NVIDIA's GPUs; empty if there is none."""
    try:
        found = _NUMBER.search((nvidia / "version").read_text())
    except OSError:
        return ""
    return found[0] if found else ""


@functools.cache
def gpu_models(nvidia: Path = _NVIDIA) -> Sequence[str]:
    """Return the models of this machine's NVIDIA GPUs, in the order of their device files."""
    models = {}
    for file in nvidia.glob("gpus/*/information"):
        with contextlib.suppress(OSError):
            text = file.read_text(errors="replace")
            model, minor = _MODEL.search(text), _MINOR.search(text)
            if model and minor:
                models[int(minor[1])] = model[1]
    return [models[minor] for minor in sorted(models)]


def names_of_gpus(gpus: Sequence[str], models: Sequence[str]) -> tuple[str, ...]:
    """Return the models of GPUs; empty if they are unknown.

    Args:
        gpus: the ids of the GPUs, as in ``CUDA_VISIBLE_DEVICES``.
        models: the models of the GPUs of their machine.
    """
    if len(set(models)) == 1:
        return (models[0],) * len(gpus)
    indices = [int(gpu) for gpu in gpus if gpu.isdecimal() and int(gpu) < len(models)]
    return tuple(models[index] for index in indices) if len(indices) == len(gpus) else ()


def differing_versions(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of what two nodes have in different versions. Builds of one version do not differ."""
    return [
        name
        for name in first.keys() & other.keys()
        if _LOCAL_LABEL.sub("", first[name]) != _LOCAL_LABEL.sub("", other[name])
    ]
