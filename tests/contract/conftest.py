"""The runtimes under test. A test that takes ``runtime`` runs on every one of them, with the same body.

A scenario that not every runtime can support selects runtimes by their capabilities; see ``runtimes.py``.
``DRIVETRAIN_CONTRACT=all`` also runs what by default is left out, see ``same_on_ray`` and ``driver_only``.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Callback, DataConfig, DataParallelTrainer, Result, RunConfig, ScalingConfig
from drivetrain.plugin import BackendConfig
from tests.contract.runtimes import ALL, CAPABILITIES
from tests.support import Driver, Pipe, open_pipe

COMMAND = "{worker}"
"""The template of the runtime ``command``: the workers are started on this machine, one after another."""


@dataclass
class RuntimeUnderTest:
    """One runtime, with storage per test."""

    name: str
    storage_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    drivers: list[Driver] = field(default_factory=list)

    @property
    def has_processes(self) -> bool:
        """True if the train function runs in any number of worker processes."""
        return self.supports("processes")

    def supports(self, capability: str) -> bool:
        """Return True if this runtime has a capability of ``runtimes.py``."""
        return capability in CAPABILITIES[self.name]

    def world(self, workers: int = 2) -> int:
        """Return the world size of a run that requests this number of workers."""
        return workers if self.has_processes else 1

    def scaling(self, workers: int = 2, **options: Any) -> ScalingConfig:
        return ScalingConfig(num_workers=workers if self.has_processes else 0, runtime=self.name, **options)

    def trainer(
        self,
        function: Callable[..., Any],
        config: Any = None,
        *,
        workers: int = 2,
        name: str = "run",
        backend_config: Any = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        callbacks: list[Callback] | None = None,
        **run_config: Any,
    ) -> DataParallelTrainer:
        return DataParallelTrainer(
            function,
            train_loop_config=config,
            backend_config=backend_config or BackendConfig(),
            scaling_config=self.scaling(workers),
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            run_config=RunConfig(
                **{
                    "name": name,
                    "storage_path": self.storage_path,
                    "callbacks": callbacks or [],
                    "verbose": 0,
                    "start_timeout_s": 180.0,
                    **run_config,
                }
            ),
        )

    def fit(self, function: Callable[..., Any], config: Any = None, **options: Any) -> Result:
        return self.trainer(function, config, **options).fit()

    def start_driver(self, source: str, arguments: Mapping[str, Any] | None = None) -> Driver:
        """Start a script that gets this runtime's scaling and storage in ``sys.argv[1]``."""
        given = {
            "runtime": self.name,
            "num_workers": 2 if self.has_processes else 0,
            "storage_path": str(self.storage_path),
            **(arguments or {}),
        }
        driver = Driver(self.storage_path, source, given, dict(self.environment))
        self.drivers.append(driver)
        return driver


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the scenarios that are marked with ``same_on_ray`` or ``driver_only`` on these runtimes."""
    if os.environ.get("DRIVETRAIN_CONTRACT") == "all":
        return
    left_out = {item for item in items if _is_left_out(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    is_on_ray = item.get_closest_marker("ray") is not None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    is_on_command = parameters.get("runtime") == "command"
    if item.get_closest_marker("driver_only"):
        return is_on_ray or is_on_command
    return is_on_ray and item.get_closest_marker("same_on_ray") is not None


@pytest.fixture(params=ALL)
def runtime(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RuntimeUnderTest]:
    environment = {}
    if request.param == "ray":
        environment["RAY_ADDRESS"] = request.getfixturevalue("ray_address")
    if request.param == "command":
        environment["DRIVETRAIN_COMMAND"] = COMMAND
        monkeypatch.setenv("DRIVETRAIN_COMMAND", COMMAND)
    under_test = RuntimeUnderTest(request.param, tmp_path, environment)
    yield under_test
    for driver in under_test.drivers:
        driver.clean_up()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """Receives messages of worker processes."""
    with open_pipe(tmp_path / "pipe") as made:
        yield made


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Pipe]:
    """Makes worker processes wait for each other, or for the test."""
    with open_pipe(tmp_path / "gate") as made:
        yield made
