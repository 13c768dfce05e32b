"""Fixtures for training runs with two real processes on this machine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Result]:
    """Run a train function, by default on two local workers."""

    def run(
        function: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        max_failures: int = 0,
        callbacks: tuple[Any, ...] = (),
        **options: Any,
    ) -> Result:
        return TorchTrainer(
            function,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=workers, runtime="local" if workers else "inprocess"),
            run_config=RunConfig(
                storage_path=tmp_path,
                verbose=0,
                callbacks=callbacks,
                failure_config=FailureConfig(max_failures=max_failures),
                start_timeout_s=180,
            ),
            **options,
        ).fit()

    return run


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks in the order of the ranks. Every rank must call it."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
