"""A fixture that trains in two processes on this machine."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from drivetrain import FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_tf import TensorflowTrainer


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Set the same variables for all tests; with different ones the fork server would import TensorFlow again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        yield


@pytest.fixture(scope="session")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Return a function that runs a train function, on two local workers by default."""

    def run(
        function: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        runtime: str = "local",
        max_failures: int = 0,
        run: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Result:
        given = {} if config is None else {"train_loop_config": config}
        return TensorflowTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=workers, runtime=runtime),
            run_config=RunConfig(
                storage_path=tmp_path_factory.mktemp("runs"),
                verbose=0,
                worker_output="none",
                failure_config=FailureConfig(max_failures=max_failures),
                preload=("tf_keras", "sklearn.datasets"),
                start_timeout_s=180,
                **(run or {}),
            ),
            **given,
            **options,
        ).fit()

    return run
