"""The conformance kits for the provider of Ray datasets, for trainers in Ray Tune, and for the runtime."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain_ray import RayDatasets
from drivetrain_testing import DatasetConformance, RuntimeCapability, RuntimeConformance, TrainableConformance


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # raised within Ray Data
# Ray Data does not close one log file if a process reads two datasets at the same time.
@pytest.mark.filterwarnings(r"ignore:Exception ignored in.*ray-data-dataset:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("ray_address")
class TestRay(DatasetConformance):
    provider = RayDatasets
    rows_left_out = 1

    def make_dataset(self, directory: Path, rows: int) -> Any:
        import ray.data

        return ray.data.from_items([{"id": n, "group": n // 10} for n in range(rows)])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_address")
class TestRayTune(TrainableConformance):
    name = "ray-tune"

    def run_trial(self, trainable: Any, config: dict[str, Any], directory: Path) -> Any:
        from ray import tune

        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # Tune logs the traceback of every failed trial
        run_config = tune.RunConfig(name="search", storage_path=str(directory), verbose=0)
        (result,) = tune.Tuner(trainable, param_space=config, run_config=run_config).fit()
        if result.error is not None:
            raise result.error
        return result.metrics


@pytest.mark.ray
@pytest.mark.usefixtures("ray_address")
class TestRayRuntime(RuntimeConformance):
    runtime = "ray"
    # Ray does not tell how the process of an actor has exited.
    capabilities = frozenset(RuntimeCapability) - {RuntimeCapability.EXIT_CODES}

    def driver_environment(self) -> Mapping[str, str]:
        import ray

        return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
