import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

import drivetrain
from drivetrain._plugins.known import EXTRAS, OWN
from tests.toml import tomllib

PACKAGES = Path(__file__).parents[2] / "packages"
PROJECTS = {
    file.parent.name: tomllib.loads(file.read_text())["project"] for file in sorted(PACKAGES.glob("*/pyproject.toml"))
}
VERSION = PROJECTS["core"]["version"]
OUR_REQUIREMENT = re.compile(r"(drivetrain[\w-]*)(?:\[([\w,-]+)\])?(.*)")

# (package, entry-point group or "console_scripts", name, "module:attribute")
ENTRY_POINTS = [
    (package, group, name, target)
    for package, project in PROJECTS.items()
    for group, targets in {
        **project.get("entry-points", {}),
        "console_scripts": project.get("scripts", {}),
    }.items()
    for name, target in targets.items()
]


def requirements(package: str) -> list[str]:
    """Return all requirements of `package`, extras included."""
    project = PROJECTS[package]
    extras = project.get("optional-dependencies", {}).values()
    return [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]


def installed_distribution(package: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(PROJECTS[package]["name"])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PROJECTS[package]['name']} is not installed in this environment")


def test_all_packages_of_the_design_exist() -> None:
    assert set(PROJECTS) == {
        *("core", "drivetrain", "console", "testing", "launch", "interactive"),
        *("data", "ray", "track", "tune", "torch"),
        *("lightning", "hf", "tf", "gbdt", "horovod", "jax"),
    }
    assert PROJECTS["drivetrain"]["name"] == "drivetrain"
    for package in PROJECTS.keys() - {"drivetrain"}:
        assert PROJECTS[package]["name"] == f"drivetrain-{package}"


@pytest.mark.parametrize("package", PROJECTS)
def test_all_packages_have_the_same_version(package: str) -> None:
    assert PROJECTS[package]["version"] == VERSION


@pytest.mark.parametrize(
    "file", sorted(PACKAGES.glob("*/src/drivetrain_*/__init__.py")), ids=lambda file: file.parent.name
)
def test_every_module_has_the_version_of_its_package(file: Path) -> None:
    assert f'\n__version__ = "{VERSION}"\n' in file.read_text()


@pytest.mark.parametrize("package", PROJECTS)
def test_our_packages_require_each_other_in_the_same_version(package: str) -> None:
    major, minor, _ = VERSION.split(".")
    expected = f"=={VERSION}" if package == "drivetrain" else f">={VERSION},<{major}.{int(minor) + 1}"
    ours = [match for one in requirements(package) if (match := OUR_REQUIREMENT.fullmatch(one))]
    by_name = {project["name"]: project for project in PROJECTS.values()}
    for match in ours:
        name, extras, specifier = match.groups()
        assert specifier == expected, match.string
        known_extras = by_name[name].get("optional-dependencies", {})
        assert set((extras or "").split(",")) - {""} <= known_extras.keys(), match.string


def test_the_extra_named_all_is_the_union_of_the_others() -> None:
    def flattened(listed: list[str]) -> set[tuple[str, str]]:
        ours = [(requirement, OUR_REQUIREMENT.fullmatch(requirement)) for requirement in listed]
        found = {
            (match[1], extra) if match else (requirement, "")
            for requirement, match in ours
            for extra in ((match[2] or "").split(",") if match else [""])
        }
        with_extras = {name for name, extra in found if extra}
        return {(name, extra) for name, extra in found if extra or name not in with_extras}

    extras = dict(PROJECTS["drivetrain"]["optional-dependencies"])
    all_of_them = extras.pop("all")
    extras.pop("testing", None)  # for plugin authors, not for training
    extras.pop("aim")  # not released for every Python version that drivetrain supports
    assert flattened(all_of_them) == flattened([one for listed in extras.values() for one in listed])


def test_the_core_knows_the_extras_and_the_distributions_that_they_install() -> None:
    extras = PROJECTS["drivetrain"]["optional-dependencies"]
    ours = {name: OUR_REQUIREMENT.fullmatch(listed[0]) for name, listed in extras.items() if name != "all"}
    assert {name: match[1] for name, match in ours.items() if match} == EXTRAS
    assert {project["name"] for project in PROJECTS.values()} == OWN


@pytest.mark.parametrize("package", PROJECTS)
def test_plugins_require_their_framework_with_only_a_lower_bound(package: str) -> None:
    for requirement in requirements(package):
        if not OUR_REQUIREMENT.fullmatch(requirement):
            assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+", requirement), requirement


@pytest.mark.parametrize("package", PROJECTS)
def test_every_package_ships_its_types_and_the_licence(package: str) -> None:
    project = PROJECTS[package]
    names = {"core": ["drivetrain"], "drivetrain": []}.get(package, [project["name"].replace("-", "_")])
    assert all((PACKAGES / package / "src" / name / "py.typed").is_file() for name in names)
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (PACKAGES / package / "LICENSE").read_text()


@pytest.mark.parametrize(("package", "group", "name", "target"), ENTRY_POINTS)
def test_declared_entry_points_are_installed_and_name_existing_modules(
    package: str, group: str, name: str, target: str
) -> None:
    distribution = installed_distribution(package)
    (entry_point,) = distribution.entry_points.select(group=group, name=name)
    assert entry_point.value == target, "the installed metadata is out of date: run `nox -s dev`"
    assert importlib.util.find_spec(entry_point.module), f"{target}: no such module"


def test_package_version_matches_its_metadata() -> None:
    assert drivetrain.__version__ == VERSION
