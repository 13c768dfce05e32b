"""Real trainings of two processes on this machine."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from drivetrain import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


@pytest.fixture(scope="session")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Runs a train function, on two local workers if nothing else is asked for."""

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
        where = "local" if workers else "inprocess"
        given = {} if config is None else {"train_loop_config": config}
        return trainer(
            function,
            scaling_config=ScalingConfig(num_workers=workers, runtime=runtime or where),
            run_config=RunConfig(
                storage_path=tmp_path_factory.mktemp("runs"),
                verbose=0,
                worker_output="none",
                failure_config=FailureConfig(max_failures=max_failures),
                preload=("transformers.trainer",),  # the import takes 5 s, which all workers of a file's tests share
                start_timeout_s=60,
                **(run or {}),
            ),
            **given,
            **options,
        ).fit()

    return run
