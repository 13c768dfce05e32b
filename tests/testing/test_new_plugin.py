"""`drivetrain new-plugin`: every scaffold is generated, installed, checked and tested like the package of an author."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain._plugins.loading import KINDS
from drivetrain_console import main
from drivetrain_testing._newplugin import SCAFFOLDS
from tests.core.conftest import Install
from tests.support import ROOT
from tests.toml import tomllib

TEMPLATES = ROOT / "packages" / "testing" / "src" / "drivetrain_testing" / "templates"

LONG_NAME = "name-of-twenty-chars"
"""The sources of a plugin with a longer name may have to be formatted again."""

WITHOUT_OPTIONAL_IMPORTS = """
[[tool.mypy.overrides]]
module = ["IPython.*", "jax.*"]
follow_imports = "skip"
"""
"""Settings of mypy: skip modules that dependencies import only if they are installed, to save a third of the time."""


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a distribution of each kind."""
    assert {folder.name for folder in TEMPLATES.iterdir()} == {"common", *SCAFFOLDS}
    directory = tmp_path_factory.mktemp("generated")
    for kind in SCAFFOLDS:
        assert main(["new-plugin", kind, f"x-{kind}", "--directory", str(directory), "--author", 'J. "Jo" Doe']) == 0
    return {kind: directory / f"drivetrain-x-{kind}" for kind in SCAFFOLDS}


@pytest.fixture(scope="module")
def installed(generated: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which all these distributions are installed."""
    pytest.importorskip("hatchling")
    site = tmp_path_factory.mktemp("site")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-compile")
    run("-m", "pip", "install", "--quiet", *options, "--target", site, *generated.values())
    return site


def run(*words: object, site: Path | None = None, cwd: Path | None = None, **variables: str) -> str:
    """Run Python with packages that are installed in a directory, and return the output."""
    environment = {**os.environ, "PYTHONPATH": str(site or ""), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, *map(str, words)]
    process = subprocess.run(
        command, cwd=cwd, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


@contextlib.contextmanager
def limited_file_size(limit: int) -> Iterator[None]:
    """Let writes beyond a number of bytes fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_every_hook_has_a_scaffold() -> None:
    assert {kind for scaffold in SCAFFOLDS.values() for kind in scaffold.entry_points} == set(KINDS)
    assert {*KINDS, "tracker"} == set(SCAFFOLDS)


def test_every_scaffold_is_a_valid_plugin(installed: Path) -> None:
    rows = json.loads(run(Path(sys.executable).with_name("drivetrain"), "plugins", "--json", site=installed))

    ours = [row for row in rows if row["distribution"].startswith("drivetrain-x-")]
    assert {row["distribution"] for row in ours} == {f"drivetrain-x-{kind}" for kind in SCAFFOLDS}
    assert {(row["status"], row["api"]) for row in ours} == {("installed", 1)}


@pytest.mark.slow
@pytest.mark.campaign
def test_every_scaffold_has_its_types(generated: dict[str, Path], installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for kind, folder in generated.items():
        assert (folder / "src" / f"drivetrain_x_{kind}" / "py.typed").is_file()
    sources = [folder / name for folder in generated.values() for name in ("src", "tests")]
    settings = tmp_path / "pyproject.toml"
    settings.write_text((generated["backend"] / "pyproject.toml").read_text() + WITHOUT_OPTIONAL_IMPORTS)
    run("-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path, *sources, site=installed)


def test_every_scaffold_is_formatted(generated: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for kind in SCAFFOLDS:
        assert main(["new-plugin", kind, LONG_NAME, "--directory", str(tmp_path)]) == 0
        (tmp_path / f"drivetrain-{LONG_NAME}").rename(tmp_path / kind)
    folders = [*generated.values(), tmp_path]
    run("-m", "ruff", "check", "--no-cache", *folders)
    run("-m", "ruff", "format", "--no-cache", "--check", *folders)


@pytest.mark.parametrize(("kind", "lowest", "highest"), [("backend", 3.0, 3.0), ("trainer", 0.0, 0.001)])
def test_example_in_the_readme_prints_the_result(
    kind: str, lowest: float, highest: float, generated: dict[str, Path], installed: Path, tmp_path: Path
) -> None:
    script = tmp_path / "example.py"
    script.write_text((generated[kind] / "README.md").read_text().partition("```python\n")[2].partition("```")[0])
    printed = run(script, site=installed, cwd=tmp_path, DRIVETRAIN_STORAGE_PATH=str(tmp_path / "runs"))
    assert lowest <= float(printed.splitlines()[-1]) <= highest


@pytest.mark.parametrize("kind", SCAFFOLDS)
def test_tests_of_scaffold_pass(kind: str, generated: dict[str, Path], installed: Path) -> None:
    if kind == "strategy":
        pytest.importorskip("torch")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", site=installed, cwd=generated[kind])


def test_metadata_and_ci_state_the_supported_versions(generated: dict[str, Path]) -> None:
    for kind, folder in generated.items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["authors"] == [{"name": 'J. "Jo" Doe'}]
        assert "drivetrain-core>=0.1.0,<0.2" in project["dependencies"]
        assert project["license"] == "Apache-2.0"
        assert "Apache License" in (folder / "LICENSE").read_text()
        tests = (folder / ".github" / "workflows" / "test.yml").read_text()
        assert '["drivetrain==0.1.0", "drivetrain"]' in tests
        assert "${{ matrix.drivetrain }}" in tests
        texts = [file.read_text() for file in folder.rglob("*") if file.is_file() and file.suffix != ".yml"]
        assert not any("$" in text.replace("$'", "") for text in texts), kind


def test_license_is_that_of_drivetrain(generated: dict[str, Path]) -> None:
    own = (ROOT / "packages" / "core" / "LICENSE").read_text()
    assert {(folder / "LICENSE").read_text() for folder in generated.values()} == {own}


def test_command_prints_the_next_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "policy", "patient", "--directory", str(tmp_path)]) == 0
    folder = tmp_path / "drivetrain-patient"
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"created {folder}, a policy plugin that works. Install and test it:",
        f"  cd {folder}",
    ]
    assert "authors" not in (folder / "pyproject.toml").read_text()


def test_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "policy", "patient", "--directory", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    folder = tmp_path / "drivetrain-patient"
    assert printed["path"] == str(folder)
    assert (printed["distribution"], printed["package"]) == ("drivetrain-patient", "drivetrain_patient")
    assert printed["files"] == sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_unknown_kind_is_refused_with_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["new-plugin", "call-back", "x"])
    assert end.value.code == 2
    assert "expected one of backend, trainer, " in (error := capsys.readouterr().err)
    assert "got 'call-back'. Did you mean 'callback'?" in error


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("My_Thing", "my-thing"),
        ("MyThing", "my-thing"),
        ("drivetrain-my-thing", "my-thing"),
        ("drivetrain_thing", "thing"),
        ("my--thing", "my-thing"),
        ("../thing", "thing"),
        ("3d", ""),
        ("", ""),
        ("drivetrain", ""),
        ("größe", ""),
        ("thing\n", "thing"),
        ("$thing", "thing"),
    ],
)
def test_invalid_name_is_refused_with_a_valid_one(
    name: str, suggestion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-plugin", "callback", name, "--directory", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "such as my-thing, got " in error
    assert (f"Did you mean {suggestion!r}?" in error) == bool(suggestion)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("callback", "csv", "drivetrain-core 0.1.0 provides the callback 'csv'. Choose another name\n"),
        ("tracker", "csv", "provides the callback 'csv'"),
        ("callback", "torch", "there is a distribution drivetrain-torch. Choose another name"),
        ("callback", "lightning", "there is a distribution drivetrain-lightning"),  # whether installed or not
        ("callback", "third", "there is a distribution drivetrain-third"),
        ("backend", "none", "'none' stands for training without a framework"),
    ],
)
def test_name_in_use_is_refused(
    kind: str, name: str, message: str, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("drivetrain-third", "drivetrain_third", "", {})
    assert main(["new-plugin", kind, name, "--directory", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / f"drivetrain-{name}").exists()


def test_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "drivetrain-mine"
    folder.mkdir()
    assert main(["new-plugin", "callback", "mine", "--directory", str(tmp_path)]) == 2
    assert f"expected a new path, got {folder}, which exists" in capsys.readouterr().err
    assert not list(folder.iterdir())


def test_directory_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for directory, reason in (
        (file, "Not a directory"),
        (tmp_path / "none", "No such file or directory"),
        (Path("/proc"), "No such file or directory"),
    ):
        assert main(["new-plugin", "callback", "mine", "--directory", str(directory)]) == 2
        assert f"cannot create {directory}/drivetrain-mine: {reason}" in capsys.readouterr().err


def test_nothing_remains_if_a_file_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    author = "x" * 200_000
    with limited_file_size(100_000):
        assert main(["new-plugin", "callback", "mine", "--directory", str(tmp_path), "--author", author]) == 2
    assert "File too large" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_author_must_be_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "callback", "mine", "--directory", str(tmp_path), "--author", "a\nb"]) == 2
    assert "--author: expected printable characters, got 'a\\nb'" in capsys.readouterr().err
