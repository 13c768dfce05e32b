"""Fixtures for training runs with two real processes on this machine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_horovod import HorovodConfig, HorovodTrainer


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Result]:
    """Run a train function, by default on two local workers."""

    def run(
        function: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        runtime: str = "local",
        max_failures: int = 0,
        callbacks: tuple[Any, ...] = (),
        horovod: HorovodConfig | None = None,
    ) -> Result:
        return HorovodTrainer(
            function,
            train_loop_config=config,
            horovod_config=horovod or HorovodConfig(timeout_s=90),
            scaling_config=ScalingConfig(num_workers=workers, runtime=runtime if workers else "inprocess"),
            run_config=RunConfig(
                storage_path=tmp_path / "results",
                verbose=0,
                callbacks=callbacks,
                failure_config=FailureConfig(max_failures=max_failures),
                start_timeout_s=120,
                hang_timeout_s=120,
            ),
        ).fit()

    return run
