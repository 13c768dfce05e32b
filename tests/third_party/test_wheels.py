"""The wheels that are kept for each release: none is missing, and those of this version match their sources."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from drivetrain import __version__
from tests.third_party.wheels import SOURCES, build, contents, kept_versions, released_versions, wheels_of

PLUGINS = {"acme_average", "acme_backoff", "acme_lines", "acme_processes", "acme_sqlite", "acme_webhook"}
MAX_LINES = 90  # of code: an example that people read
PUBLIC = {"drivetrain", "drivetrain.plugin", "drivetrain_torch"}


def test_wheels_of_every_release_and_of_this_version_are_kept() -> None:
    missing = {__version__, *released_versions()} - set(kept_versions())
    assert not missing, f"no wheels for {missing}: run `nox -s third_party_wheels`"
    assert {wheel.name.partition("-")[0] for wheel in wheels_of(__version__)} == PLUGINS
    assert all(wheels_of(version) for version in kept_versions())


def test_wheels_of_this_version_are_built_from_the_sources(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed in this environment")
    assert contents(build(tmp_path)) == contents(wheels_of(__version__)), "run `nox -s third_party_wheels`"


@pytest.mark.parametrize("project", sorted(path.name for path in SOURCES.iterdir()))
def test_plugin_uses_public_names_only_and_is_short(project: str) -> None:
    imported, lines = set[str](), 0
    for file in (SOURCES / project).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            if isinstance(node, (ast.stmt, ast.expr)):
                lines = max(lines, node.end_lineno or 0)
    others = {name for name in imported - PUBLIC if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others <= {"fsspec", "torch", "torch.distributed"}
