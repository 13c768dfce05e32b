"""``docs/platforms.md`` lists the oldest and the newest tested version of each framework."""

import re

from tests.docs.pages import DOCS
from tests.support import ROOT
from tests.toml import tomllib

SHORTER = {"tensorflow": "tensorflow-cpu", "xgboost": "xgboost-cpu"}
"""Frameworks that are tested under the name of a smaller build of the same version."""
ROW = re.compile(r"^\| [^|]+ \| `([\w-]+)` \| ([\w.]+) \| ([\w.]+) \|", re.MULTILINE)
"""A row: the name of the framework, its package, the oldest version, and the newest."""


def lower_bounds() -> dict[str, str]:
    """Return the lower bounds of all packages."""
    found: dict[str, str] = {}
    for file in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        listed = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        for requirement in (one for each in listed for one in each if not one.startswith("drivetrain")):
            name, _, version = requirement.partition(">=")
            assert found.setdefault(name, version) == version, f"packages disagree about {name}"
    return found


def newest_tested() -> dict[str, str]:
    """Return the versions with which the repository is tested."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(found.groups() for line in lines if (found := re.match(r"([\w-]+)==([\w.]+)", line)))


def test_table_has_the_lower_bounds_of_the_packages_and_the_tested_versions() -> None:
    found = ROW.findall((DOCS / "platforms.md").read_text())
    rows = {name: (oldest, newest) for name, oldest, newest in found}
    bounds, tested = lower_bounds(), newest_tested()
    frameworks = {"torch", "lightning", "transformers", "accelerate", "deepspeed", "tensorflow"}
    assert rows.keys() == frameworks | {"xgboost", "lightgbm", "jax", "ray", "fsspec"}
    assert rows == {name: (bounds[name], tested[SHORTER.get(name, name)]) for name in rows}
