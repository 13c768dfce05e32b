"""The wheels that are kept for each release: none is missing, and those of this version match their sources."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from drivetrain import __version__
from tests.third_party.wheels import (
    SOURCES,
    SUPPORTED_SINCE,
    build,
    contents,
    kept_versions,
    released_versions,
    wheels_of,
)

PLUGINS = {"acme_average", "acme_backoff", "acme_lines", "acme_processes", "acme_sqlite", "acme_webhook"}
ALLOWED = {"drivetrain", "drivetrain_torch", "fsspec", "torch", "torch.distributed"}
MAX_LINES = 135


def test_wheels_of_every_release_and_of_this_version_are_kept() -> None:
    missing = {__version__, *released_versions()} - set(kept_versions())
    assert not missing, f"no wheels for {missing}: run `nox -s third_party_wheels`"
    assert {wheel.name.partition("-")[0] for wheel in wheels_of(__version__)} == PLUGINS
    assert all(wheels_of(version) for version in kept_versions())
    assert kept_versions()[0] == SUPPORTED_SINCE


def test_wheels_of_this_version_are_built_from_the_sources(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed in this environment")
    assert contents(build(tmp_path)) == contents(wheels_of(__version__)), "run `nox -s third_party_wheels`"


@pytest.mark.parametrize("project", sorted(PLUGINS))
def test_plugin_is_a_short_example_that_uses_public_names_only(project: str) -> None:
    imported, lines = set[str](), 0
    for file in sorted((SOURCES / project.replace("_", "-") / "src").rglob("*.py")):
        lines += sum(1 for line in file.read_text().splitlines() if line.strip())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    imported = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in imported if not re.fullmatch(r"drivetrain\.plugin(\.[a-z]+)?", name)} <= ALLOWED
    assert lines <= MAX_LINES
