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
    """The directories that hold the import packages."""
    return sorted(ROOT.glob("packages/*/src"))


def missing_requirements() -> list[str]:
    """The dependencies of the core that this environment lacks. Their import names are those of the distributions."""
    requirements = _project(ROOT / "packages" / "core")["dependencies"]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return [name for name in names if importlib.util.find_spec(name) is None]


def import_paths(metadata: Path) -> list[str]:
    """What ``PYTHONPATH`` has to begin with; writes the packages' entry points below the directory ``metadata``."""
    write_metadata(metadata)
    return [*map(str, sources()), str(ROOT), str(metadata)]


def write_metadata(directory: Path) -> None:
    """Writes what an installation of each package would declare: its name, version, requirements and entry points."""
    for package in sorted(path.parent for path in sources()):
        project = _project(package)
        info = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        required = [f"Requires-Dist: {requirement}" for requirement in project.get("dependencies", ())]
        lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}", *required]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text("\n".join(_entry_points(project)) + "\n")


def environment(paths: list[str]) -> dict[str, str]:
    """The variables of a process that uses this checkout; worker processes inherit them."""
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited])}


def use(paths: list[str]) -> None:
    """Makes the packages importable in this process as well."""
    sys.path[:0] = paths


def _entry_points(project: dict[str, Any]) -> Iterator[str]:
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    for group, points in groups.items():
        yield f"[{group}]"
        yield from (f"{name} = {target}" for name, target in points.items())


def _project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]
