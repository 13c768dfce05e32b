"""Fixtures for training runs with two real processes on this machine."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from drivetrain import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


@pytest.fixture(scope="session")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Run a train function, by default on two local workers."""

    def run(
        function: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        runtime: str | None = None,
        trainer: type[DataParallelTrainer] = TorchTrainer,
        max_failures: int = 0,
        run: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Result:
        default_runtime = "local" if workers else "inprocess"
        config_argument = {} if config is None else {"train_loop_config": config}
        return trainer(
            function,
            scaling_config=ScalingConfig(num_workers=workers, runtime=runtime or default_runtime),
            run_config=RunConfig(
                storage_path=tmp_path_factory.mktemp("runs"),
                verbose=0,
                worker_output="none",
                failure_config=FailureConfig(max_failures=max_failures),
                preload=("transformers.trainer",),  # takes 5 s; all workers of a test file share it
                start_timeout_s=60,
                **(run or {}),
            ),
            **config_argument,
            **options,
        ).fit()

    return run
