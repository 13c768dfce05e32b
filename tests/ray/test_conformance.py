"""The provider of Ray datasets passes the conformance kit."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.testing import DatasetConformance
from drivetrain_ray import RayDatasets


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # Ray Data warns of what it does itself
# Of two datasets that are read at a time in one process, Ray Data leaves the log file of one open.
@pytest.mark.filterwarnings(r"ignore:Exception ignored in.*ray-data-dataset:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("ray_address")
class TestRay(DatasetConformance):
    provider = RayDatasets
    rows_left_out = 1

    def make_dataset(self, directory: Path, rows: int) -> Any:
        import ray.data

        return ray.data.from_items([{"id": n, "group": n // 10} for n in range(rows)])
