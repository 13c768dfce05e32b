"""Settings and observers that come from the environment."""

from __future__ import annotations

import json
import timeit
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    ConfigurationError,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    TrainContext,
    TrainingFailedError,
)
from drivetrain.plugin.datasets import note_batch
from drivetrain.plugin.drivers import OVERRIDES
from drivetrain.plugin.sessions import OBSERVER, Observer


def train_func() -> int:
    for number in range(2):
        note_batch([number], number)
        drivetrain.report({"number": number})
    return drivetrain.get_context().get_world_size()


def trainer(tmp_path: Path, num_workers: int = 0) -> DataParallelTrainer:
    run_config = RunConfig(storage_path=tmp_path / "own", name="own", verbose=0)
    return DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=num_workers), run_config=run_config)


def test_settings_of_the_environment_replace_those_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_config = {"storage_path": str(tmp_path / "other"), "name": "other", "failure_config": {"max_failures": 3}}
    monkeypatch.setenv(OVERRIDES, json.dumps({"run_config": run_config, "scaling_config": {"num_workers": 2}}))

    results = [trainer(tmp_path).fit() for _ in range(2)]

    assert [result.return_value for result in results] == [2, 2]
    names = [Path(result.path).name for result in results]
    assert len({*names}) == 2  # each call of fit() has its own run
    assert all(Path(result.path).parent == tmp_path / "other" for result in results)
    assert "max_failures=3" in json.loads(Path(results[0].path, "run.json").read_text())["run_config"]
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ('{"datasets": {}}', "with the keys run_config and scaling_config"),
        ('{"run_config": 3}', "objects as their values"),
        ('{"run_config": {"nam": "x"}}', "expected fields of RunConfig"),
        ('{"run_config": {"verbose": 7}}', "verbose"),
    ],
)
def test_invalid_settings_of_the_environment_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv(OVERRIDES, value)
    with pytest.raises(ConfigurationError, match=message):
        trainer(tmp_path).fit()
    assert not (tmp_path / "own").exists()


class Recorder(Observer):
    """Writes the events into a file per rank."""

    def on_start(self, context: TrainContext, iteration: int) -> None:
        self._file = Path(context.storage.root).with_name(f"events_{context.get_world_rank()}")
        self._add("start", iteration)

    def on_batch(self, batch: Any, number: int, repeated: int) -> None:
        self._add("batch", batch, number, repeated)

    def before_report(self, iteration: int) -> None:
        self._add("before", iteration)

    def on_report(self, iteration: int, has_checkpoint: bool) -> None:
        self._add("report", iteration, has_checkpoint)

    def on_end(self) -> None:
        self._add("end")

    def _add(self, *event: object) -> None:
        with self._file.open("a") as file:
            file.write(f"{event}\n")


def test_observer_follows_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OBSERVER, f"{__name__}:Recorder")
    trainer(tmp_path, num_workers=2).fit()

    expected = [
        *("('start', 0)", "('batch', [0], 0, 0)", "('before', 1)", "('report', 1, False)"),
        *("('batch', [1], 1, 0)", "('before', 2)", "('report', 2, False)", "('end',)"),
    ]
    files = sorted(tmp_path.rglob("events_*"))
    assert [file.name for file in files] == ["events_0", "events_1"]
    assert all(file.read_text().splitlines() == expected for file in files)


@pytest.mark.parametrize("name", ["missing_module:Recorder", f"{__name__}:train_func", "os:missing"])
def test_unknown_observer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(OBSERVER, name)
    with pytest.raises(TrainingFailedError, match=OBSERVER):
        trainer(tmp_path).fit()


def test_batches_cost_nothing_without_an_observer() -> None:
    count = 100_000
    assert min(timeit.repeat(lambda: note_batch(None, 0, 0), number=count, repeat=5)) / count < 1e-6
