"""The wheels of each release, installed in a directory of their own, and jobs in processes that use them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import Driver, Pipe, open_pipe
from tests.third_party.wheels import install, kept_versions, wheels_of

JOBS = Path(__file__).parent / "jobs"

Start = Callable[..., Driver]


@pytest.fixture(scope="session", params=kept_versions())
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the wheels of a release are installed. Tests run once for each release."""
    directory = tmp_path_factory.mktemp(f"site-{request.param}")
    install(wheels_of(request.param), directory)
    return directory


@pytest.fixture
def start(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a job of this folder in a process in which the wheels are installed.

    Its keyword arguments are the job's arguments, in addition to ``storage_path``.
    """
    monkeypatch.setenv("PYTHONPATH", str(site))
    drivers = []

    def start_job(name: str, **arguments: Any) -> Driver:
        given = {"storage_path": str(tmp_path / "runs"), **arguments}
        driver = Driver(tmp_path, (JOBS / f"{name}.py").read_text(), given, {})
        drivers.append(driver)
        return driver

    yield start_job
    for driver in drivers:
        driver.clean_up()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """Receives messages of worker processes, and releases them."""
    with open_pipe(tmp_path / "pipe") as made:
        yield made
