"""The example plugins of the documentation, and their installation for the programs of a page."""

import os
import re
from pathlib import Path

from tests.docs.pages import CODE, Page
from tests.toml import tomllib

EXAMPLES = sorted(path.parent for path in (CODE / "plugins").glob("*/pyproject.toml"))

_INCLUDED = re.compile(r"^\{literalinclude\} (\S+/pyproject\.toml)$")


def included_examples(page: Page) -> list[Path]:
    """Return the folders of the example plugins whose ``pyproject.toml`` a page includes."""
    found = [match[1] for block in page.blocks if (match := _INCLUDED.match(block.info))]
    return [(page.path.parent / name).resolve().parent for name in found]


def install_examples(examples: list[Path], site: Path) -> str:
    """Install example plugins like pip: write the metadata that their ``pyproject.toml`` declares.

    Args:
        examples: the folders of the plugins.
        site: the directory for the metadata, which this function creates.

    Returns:
        The value of ``PYTHONPATH`` with which a new process has the plugins.
    """
    for example in examples:
        project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        required = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{required}"
        )
        lines = []
        for group, points in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join(map(str, [*examples, site]))
