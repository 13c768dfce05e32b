"""Builds the wheels of the third-party distributions, and installs those that were built for a release.

Usage, from the repository root, in an environment with hatchling::

    python -m tests.third_party.wheels

The wheels of the current version are rebuilt if the sources have changed. The wheels of a released version never
change, because later versions of drivetrain must be able to run them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from drivetrain import __version__
from tests.support import ROOT

SOURCES = ROOT / "tests/third_party/distributions"
WHEELS = ROOT / "tests/third_party/wheels"
CHANGELOG = ROOT / "CHANGELOG.md"

SUPPORTED_SINCE = "0.1.0"
"""The first version whose plugins this version must run. It changes with ``drivetrain.plugin.API_VERSION``."""

# hatchling may change these files; they do not depend on the sources.
_OF_THE_BUILDER = ("/WHEEL", "/RECORD")
_BUILD = """
import os, sys
from hatchling.build import build_wheel
for project in sys.argv[2:]:
    os.chdir(project)
    print(build_wheel(sys.argv[1]))
"""


def version_key(version: str) -> list[int]:
    return [*map(int, version.split("."))]


def released_versions() -> list[str]:
    """Return the supported versions that have a section in the changelog."""
    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)", CHANGELOG.read_text(), re.MULTILINE)
    return [version for version in versions if version_key(version) >= version_key(SUPPORTED_SINCE)]


def kept_versions() -> list[str]:
    """Return the versions of drivetrain for which there are wheels."""
    return sorted((directory.name for directory in WHEELS.iterdir()), key=version_key)


def wheels_of(version: str) -> list[Path]:
    return sorted((WHEELS / version).glob("*.whl"))


def build(target: Path) -> list[Path]:
    """Build a wheel of each distribution."""
    projects = [str(file.parent) for file in sorted(SOURCES.glob("*/pyproject.toml"))]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}
    subprocess.run(
        [sys.executable, "-c", _BUILD, str(target), *projects],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return sorted(target.glob("*.whl"))


def contents(wheels: list[Path]) -> dict[str, dict[str, bytes]]:
    """Return the files in each wheel that depend on its sources."""
    return {wheel.name: dict(_files(wheel)) for wheel in wheels}


def _files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(_OF_THE_BUILDER):
                yield name, archive.read(name)


def install(wheels: list[Path], target: Path) -> None:
    """Install wheels with pip into a directory, without their dependencies."""
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, *wheels], check=True)


def main() -> None:
    """Store the wheels of the current version."""
    target = WHEELS / __version__
    with tempfile.TemporaryDirectory() as directory:
        built = build(Path(directory))
        if contents(built) == contents(wheels_of(__version__)):
            print(f"{target} is up to date")
            return
        if __version__ in released_versions() and wheels_of(__version__):
            sys.exit(f"{target}: these wheels are released. Set the next version first: nox -s bump -- VERSION")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for wheel in built:
            print(shutil.copy(wheel, target))


if __name__ == "__main__":
    main()
