"""The conformance kit for the provider of Ray datasets."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.testing import DatasetConformance
from drivetrain_ray import RayDatasets


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
