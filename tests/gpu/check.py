"""The definition of a check, and the object that is passed to it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain import FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer

Figures = dict[str, Any]


class Skip(Exception):
    """Raised by a check that cannot run on this machine. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the report.

    Attributes:
        module: the module of the function.
        function: takes a :class:`Run` and returns figures for the report, or None. It raises an exception on a failure.
        packages: the import names of the packages that it needs in addition to PyTorch.
        gpus: the number of GPUs that it needs.
        on_cpu: True if ``--device cpu`` can run it, to test the check itself.
        alone: True if no other check may run at the same time, because it measures performance.
        limit_s: seconds after which it is killed and counts as failed.
    """

    module: str
    function: Callable[[Run], Figures | None]
    packages: tuple[str, ...] = ()
    gpus: int = 1
    on_cpu: bool = True
    alone: bool = False
    limit_s: float = 100.0

    @property
    def name(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function.__name__}"

    @property
    def title(self) -> str:
        return (inspect.getdoc(self.function) or self.name).splitlines()[0]


def check(**options: Any) -> Callable[[Callable[[Run], Figures | None]], Check]:
    """Declare the decorated function as a check. The options are attributes of :class:`Check`."""

    def declare(function: Callable[[Run], Figures | None]) -> Check:
        return Check(module=function.__module__, function=function, **options)

    return declare


def collect(modules: Iterable[str]) -> list[Check]:
    """Return the checks of these modules, in the order of their definitions."""
    values = (value for name in modules for value in vars(importlib.import_module(name)).values())
    return [value for value in values if isinstance(value, Check)]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The resources of a check.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        gpus: the number of GPUs; with the device ``"cpu"``, the number of CPU workers that replace them.
        directory: an empty directory for this check alone.
    """

    device: str
    gpus: int
    directory: Path

    @property
    def collectives(self) -> str:
        """Return the default backend of a process group on this device."""
        return "nccl" if self.device == "cuda" else "gloo"

    def workers(self, limit: int = 2) -> int:
        """Return the number of GPUs, but at most the limit."""
        return min(self.gpus, limit)

    def scaling(self, workers: int, *, gpus_per_worker: float = 1, runtime: str = "local") -> ScalingConfig:
        if self.device == "cpu":
            return ScalingConfig(num_workers=workers, runtime=runtime)
        resources = {"GPU": gpus_per_worker}
        return ScalingConfig(num_workers=workers, use_gpu=True, resources_per_worker=resources, runtime=runtime)

    def fit(
        self,
        function: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        gpus_per_worker: float = 1,
        runtime: str = "local",
        max_failures: int = 0,
        trainer: type[TorchTrainer] = TorchTrainer,
        **options: Any,
    ) -> Result:
        """Run a train function on workers with GPUs, or on CPU workers with the device ``"cpu"``."""
        config_argument = {} if config is None else {"train_loop_config": config}
        return trainer(
            function,
            scaling_config=self.scaling(workers, gpus_per_worker=gpus_per_worker, runtime=runtime),
            run_config=self.run_config(max_failures=max_failures),
            **config_argument,
            **options,
        ).fit()

    def run_config(self, *, max_failures: int = 0) -> RunConfig:
        return RunConfig(
            storage_path=self.directory / "runs",
            verbose=0,
            failure_config=FailureConfig(max_failures=max_failures),
            start_timeout_s=60,
        )


def equal(name: str, got: object, expected: object) -> None:
    """Raise an AssertionError with both values if they differ."""
    if got != expected:
        raise AssertionError(f"{name}: expected {expected!r}, got {got!r}")


def decreases(name: str, values: list[float]) -> None:
    """Raise an AssertionError unless the last value is less than 90 % of the first one."""
    if not values[-1] < 0.9 * values[0]:
        raise AssertionError(f"{name}: expected a decrease by at least 10 %, got {values}")


def difference(got: list[float], expected: list[float], limit: float) -> float:
    """Return the largest difference of the losses after resuming; raise an AssertionError if it exceeds the limit."""
    equal("number of losses after the checkpoint", len(got), len(expected))
    largest = max(abs(actual - reference) for actual, reference in zip(got, expected, strict=True))
    if not largest <= limit:
        raise AssertionError(f"losses after the checkpoint: expected {expected} within {limit}, got {got}")
    return largest
