"""Makes the packages of this checkout usable without installing them: import paths and entry points."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def sources() -> list[Path]:
    """Return the directories that contain the import packages."""
    return sorted(ROOT.glob("packages/*/src"))


def missing_requirements() -> list[str]:
    """Return the missing dependencies of the core. Their import names are also the names of the distributions."""
    requirements = _project(ROOT / "packages" / "core")["dependencies"]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return [name for name in names if importlib.util.find_spec(name) is None]


def import_paths(metadata: Path) -> list[str]:
    """Write the packages' entry points to the directory ``metadata``; return the first entries for ``PYTHONPATH``."""
    write_metadata(metadata)
    return [*map(str, sources()), str(ROOT), str(metadata)]


def write_metadata(directory: Path) -> None:
    """Write the metadata of an installation of each package: its name, version, requirements and entry points."""
    for package in sorted(path.parent for path in sources()):
        project = _project(package)
        info = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        required = [f"Requires-Dist: {requirement}" for requirement in project.get("dependencies", ())]
        lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}", *required]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text("\n".join(_entry_points(project)) + "\n")


def environment(paths: list[str]) -> dict[str, str]:
    """Return the variables of a process that uses this checkout. Worker processes inherit them."""
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited])}


def use(paths: list[str]) -> None:
    """Make the packages importable in this process as well."""
    sys.path[:0] = paths


def _entry_points(project: dict[str, Any]) -> Iterator[str]:
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    for group, points in groups.items():
        yield f"[{group}]"
        yield from (f"{name} = {target}" for name, target in points.items())


def _project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]
