"""Fixtures for training runs with two real processes on this machine."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from drivetrain import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


@pytest.fixture(scope="module", autouse=True)
def variables_of_accelerate() -> Iterator[None]:
    """Restore the variables that Transformers sets when a test trains in this process."""
    before = _variables_of_accelerate()
    yield
    for name in _variables_of_accelerate():
        del os.environ[name]
    os.environ.update(before)


def _variables_of_accelerate() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


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
                preload=("tests.without_mlflow", "transformers.trainer", "deepspeed"),
                start_timeout_s=180,
                **(run or {}),
            ),
            **config_argument,
            **options,
        ).fit()

    return run
