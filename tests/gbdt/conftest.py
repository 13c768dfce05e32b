"""Real datasets, and a fixture that trains in several processes on this machine."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

import drivetrain
from drivetrain import Callback, CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain._runtimes.local import LocalRuntime
from drivetrain.plugin import WorkerInfo

LABEL = "target"


def shuffled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in random order, since some of the datasets are sorted by label."""
    return frame.sample(frac=1, random_state=0).reset_index(drop=True)


@pytest.fixture(scope="session")
def cancer() -> pd.DataFrame:
    return shuffled(load_breast_cancer(as_frame=True).frame)


@pytest.fixture(scope="session")
def diabetes() -> pd.DataFrame:
    return shuffled(load_diabetes(as_frame=True).frame)


@pytest.fixture(scope="session")
def digits() -> pd.DataFrame:
    return shuffled(load_digits(as_frame=True).frame)


@pytest.fixture(scope="session")
def ranking() -> pd.DataFrame:
    """60 queries with different numbers of documents; the relevance, 0 to 3, depends on two features."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(5, 40, 60)
    rows = int(sizes.sum())
    features = generator.normal(size=(rows, 4))
    score = features[:, 0] + 0.5 * features[:, 1] + 0.2 * generator.normal(size=rows)
    frame = pd.DataFrame(features, columns=list("abcd"))
    frame["query"] = np.repeat(np.arange(60), sizes)
    frame[LABEL] = pd.cut(score, [-np.inf, -0.5, 0.5, 1.2, np.inf], labels=False)
    return frame


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs a trainer, on two local workers by default."""

    def run(
        trainer: Any,
        *arguments: Any,
        workers: Any = 2,
        max_failures: int = 0,
        frequency: int = 0,
        name: str | None = None,
        runtime: Any = "local",
        run_callbacks: Sequence[Callback] = (),
        **options: Any,
    ) -> Result:
        return trainer(
            *arguments,
            scaling_config=ScalingConfig(num_workers=workers, runtime=runtime if workers else "inprocess"),
            run_config=RunConfig(
                storage_path=tmp_path,
                name=name,
                verbose=0,
                failure_config=FailureConfig(max_failures=max_failures),
                checkpoint_config=CheckpointConfig(checkpoint_frequency=frequency),
                start_timeout_s=180,
                callbacks=run_callbacks,
            ),
            **options,
        ).fit()

    return run


class DiesOnce:
    """A callback for either library that kills rank 1 after a round of the first attempt."""

    order = 40
    before_iteration = False

    def __init__(self, after_round: int) -> None:
        self.after_round = after_round

    def __call__(self, env: Any) -> None:
        self.die_after(env.iteration)

    def die_after(self, iteration: int) -> None:
        context = drivetrain.get_context()
        if context.attempt == 0 and context.get_world_rank() == 1 and iteration + 1 == self.after_round:
            os.kill(os.getpid(), signal.SIGKILL)


class ShrinkingMachine(LocalRuntime):
    """A local runtime that has room for a second worker until a worker is lost."""

    def __init__(self) -> None:
        self.space = 2

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return self.space


class Sizes(Callback):
    """Records the size of each worker group; removes the room for the second worker when a group fails."""

    def __init__(self, machine: ShrinkingMachine) -> None:
        self.machine = machine
        self.sizes: list[int] = []

    def on_group_start(self, run: Any, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self.sizes.append(len(workers))

    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        self.machine.space = 1
