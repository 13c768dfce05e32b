"""The driver keeps its promises in simulated runs with seeded faults, delays and partitions."""

import os
import random
from pathlib import Path

import pytest

from drivetrain import FailureConfig, FailureKind
from drivetrain._driver.outcomes import RunFailed, Succeeded
from tests.simulation.simulator import Scenario, Simulation

SEEDS = int(os.environ.get("DRIVETRAIN_SIMULATIONS", "100"))
SIZES = (2, 3, 4, 8, 16, 64)


def simulate(directory: Path, seed: int, failure_config: FailureConfig) -> tuple[Simulation, Succeeded | RunFailed]:
    source = random.Random(seed)
    directory.mkdir()
    simulation = Simulation(directory, source, Scenario.of(source, SIZES))
    with pytest.MonkeyPatch.context() as patch:
        outcome = simulation.run(patch, failure_config)
    return simulation, outcome


@pytest.mark.parametrize("seed", range(SEEDS))
def test_run_with_unlimited_retries_succeeds(tmp_path: Path, seed: int) -> None:
    _, outcome = simulate(tmp_path / "run", seed, FailureConfig(max_failures=-1, max_preemptions_without_progress=-1))
    assert isinstance(outcome, Succeeded)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_run_without_retries_ends_with_the_first_failure(tmp_path: Path, seed: int) -> None:
    simulation, outcome = simulate(tmp_path / "run", seed, FailureConfig(max_preemptions=0))
    assert simulation.launched == 1
    if isinstance(outcome, RunFailed):
        rank, kind = outcome.failure.rank, outcome.failure.kind
        faulty = simulation.group.faulty if simulation.group is not None else set()
        assert rank in faulty or kind in (FailureKind.HANG, FailureKind.STORAGE, FailureKind.PREEMPTION)


@pytest.mark.parametrize("seed", range(3))
def test_same_seed_gives_the_same_run(tmp_path: Path, seed: int) -> None:
    config = FailureConfig(max_failures=-1)
    first, _ = simulate(tmp_path / "first", seed, config)
    second, _ = simulate(tmp_path / "second", seed, config)
    assert first.trace == second.trace
    assert first.trace
