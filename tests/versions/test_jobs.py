"""A small job of each framework trains on two workers, fails, resumes and grows.

``DRIVETRAIN_JOBS`` selects the frameworks: names separated by commas, or ``all``. The sessions ``lowest`` and
``newest`` of nox run each job with other versions of its framework.
"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain import FailureConfig, FailureKind, Result, ScalingConfig, TrainingFailedError
from drivetrain._runtimes.local import LocalRuntime
from drivetrain.plugin import WorkerInfo
from drivetrain.plugin.sessions import OBSERVER
from tests.support import Collector, Pipe, open_pipe
from tests.versions.observer import COMMITS, KILLS

JOBS = {
    "torch": "torch_state",
    "lightning": "lightning_fit",
    "transformers": "transformers_train",
    "accelerate": "accelerate_loop",
    "tensorflow": "keras_loop",
    "xgboost": "xgboost_tables",
    "lightgbm": "lightgbm_tables",
    "jax": "jax_arrays",
}
"""The scripts in ``tests/proofs/scripts``."""
SELECTED = os.environ.get("DRIVETRAIN_JOBS", "xgboost")


class ResizableMachine(LocalRuntime):
    """This machine, with room for the number of workers that the test sets."""

    space = 2

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return self.space


class JobWatcher(Collector):
    """Notifies the workers of commits, and has room for another worker as soon as the first group trains."""

    def __init__(self, machine: ResizableMachine, commits: Pipe) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._machine = machine
        self._commits = commits

    def on_group_start(self, run: Any, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        self.sizes.append(len(workers))
        self._machine.space = 2

    def on_checkpoint(self, run: Any, checkpoint: Any) -> None:
        super().on_checkpoint(run, checkpoint)
        self._commits.release()

    @property
    def iterations(self) -> list[int]:
        """The iterations that rank 0 has reported."""
        return [report.iteration for report in self.reports if report.rank == 0]


@pytest.mark.parametrize("job", JOBS if SELECTED == "all" else SELECTED.split(","))
def test_job_recovers_from_a_killed_rank_resumes_and_grows(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer = importlib.import_module(f"tests.proofs.scripts.{JOBS[job]}").make_trainer
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(OBSERVER, "tests.versions.observer:JobObserver")
    machine = ResizableMachine()
    scaling = ScalingConfig(num_workers=(1, 2), runtime=machine, elastic_resize_monitor_interval_s=0.001)

    def fit(watcher: JobWatcher, commits: Pipe, kills: bool) -> Result:
        monkeypatch.setenv(COMMITS, commits.path)
        monkeypatch.setenv(KILLS, str(int(kills)))
        options = {"name": "job", "storage_path": tmp_path / "runs", "verbose": 0, "start_timeout_s": 180}
        failures = FailureConfig(max_failures=1)
        return make_trainer(scaling, callbacks=[watcher], resume="auto", failure_config=failures, **options).fit()

    with open_pipe(tmp_path / "first") as commits:
        failed = JobWatcher(machine, commits)
        with pytest.raises(TrainingFailedError):
            fit(failed, commits, kills=True)
    assert failed.sizes == [2, 2]
    assert [(failure.rank, failure.kind) for failure in failed.failures] == [(1, FailureKind.INFRASTRUCTURE)] * 2

    machine.space = 1
    with open_pipe(tmp_path / "second") as commits:
        grown = JobWatcher(machine, commits)
        result = fit(grown, commits, kills=False)
    assert grown.sizes == [1, 2]
    assert grown.failures == []
    assert grown.iterations[0] > 1, "the run did not resume"
    assert grown.iterations == sorted(grown.iterations), "the larger group did not continue after the last commit"
    assert result.checkpoint is not None
    assert max(grown.iterations) > max(failed.iterations)
