"""Fixtures for training runs with two real processes on this machine."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from drivetrain import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


@pytest.fixture(scope="session")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Run a train function, by default on two local workers."""

    def run(
        function: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        runtime: str = "local",
        max_failures: int = 0,
        callbacks: tuple[Any, ...] = (),
        resume_from: Checkpoint | None = None,
        datasets: Mapping[str, Any] | None = None,
    ) -> Result:
        return TorchTrainer(
            function,
            train_loop_config=config,
            resume_from_checkpoint=resume_from,
            datasets=datasets,
            scaling_config=ScalingConfig(num_workers=workers, runtime=runtime if workers else "inprocess"),
            run_config=RunConfig(
                storage_path=tmp_path_factory.mktemp("runs"),
                verbose=0,
                worker_output="none",
                callbacks=callbacks,
                failure_config=FailureConfig(max_failures=max_failures),
                preload=("tests.without_mlflow", "lightning.pytorch", "deepspeed"),
                start_timeout_s=180,
            ),
        ).fit()

    return run
