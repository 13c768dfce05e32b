"""Finds the versions of the frameworks that a run may use, without a fixed list of frameworks."""

from __future__ import annotations

import functools
import re

from drivetrain._plugins.node import BUILDS

__all__ = ["installed_versions"]

_OURS = ("drivetrain", "drivetrain-core")
_NOT_IN_RUNS = ("drivetrain-testing",)
_NAME = re.compile(r"^Name: (.+)$", re.MULTILINE)
_VERSION = re.compile(r"^Version: (.+)$", re.MULTILINE)
_REQUIREMENT = re.compile(r"^Requires-Dist: ([\w.-]+)(.*)$", re.MULTILINE)


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of the distributions that drivetrain and its plugins require, by name.

    A plugin is a distribution that requires drivetrain. The optional requirements of plugins are included, because a
    plugin for several frameworks requires none of them unconditionally. The optional requirements of drivetrain itself
    are not included. Nothing is imported.
    """
    from importlib.metadata import distributions

    versions: dict[str, str] = {}
    plugins = set(_OURS)
    required: set[str] = set()
    for distribution in distributions():
        # Searching the header is much faster than parsing it with importlib.
        try:
            header = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
        except (OSError, UnicodeDecodeError):  # a damaged package, which the run may not need
            continue
        name, version = _NAME.search(header), _VERSION.search(header)
        if name is None or version is None:
            continue
        versions.setdefault(_normalized(name[1]), version[1])
        requirements = [(_normalized(line[1]), line[2]) for line in _REQUIREMENT.finditer(header)]
        if _normalized(name[1]) in _OURS:
            required |= {other for other, condition in requirements if "extra ==" not in condition}
        elif _normalized(name[1]) not in _NOT_IN_RUNS and any(other in _OURS for other, _ in requirements):
            plugins.add(_normalized(name[1]))
            required |= {other for other, _ in requirements}
    names = {f"{name}{build}" for name in required - plugins for build in BUILDS}
    return {name: versions[name] for name in sorted(names) if name in versions}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
