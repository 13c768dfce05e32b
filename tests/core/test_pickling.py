"""Pickles name public classes by their public path, so that moving an internal file does not break ``restore``."""

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    plugin,
)
from drivetrain._base import pickling
from drivetrain._base.pickling import dumps
from drivetrain.loggers import CSVLoggerCallback
from drivetrain.plugin import BackendConfig
from drivetrain.plugin.callbacks import Trial
from drivetrain.plugin.runtimes import LocalRuntime

INSTANCES = [
    BackendConfig(),
    CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss"),
    FailureConfig(max_failures=3),
    RunConfig(name="run", callbacks=[CSVLoggerCallback()]),
    ScalingConfig(num_workers=2, runtime=LocalRuntime()),
    SyncConfig(sync_period=3.0),
    Trial(name="trial", id="3", experiment="search"),
]


def test_public_names_are_pickled_by_their_facade() -> None:
    for facade in (drivetrain, plugin):
        for name in facade.__all__:
            value = getattr(facade, name)
            data = dumps(value)
            assert b"drivetrain._" not in data, name
            assert not isinstance(value, type) or pickle.loads(data) is value


@pytest.mark.parametrize("value", INSTANCES, ids=lambda value: type(value).__name__)
def test_instance_of_a_public_class_is_pickled_by_its_facade(value: Any) -> None:
    data = dumps(value)
    assert b"drivetrain._" not in data
    assert type(pickle.loads(data)) is type(value)


def test_configuration_pickled_before_a_field_was_added_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(pickling, "fields", lambda obj: [field for field in fields(obj) if field.name != "name"])
        data = dumps(RunConfig(verbose=0, stop={"step": 4}))

    config = pickle.loads(data)
    assert (config.name, config.verbose, config.stop) == (None, 0, {"step": 4})


def test_trainer_file_names_no_internal_module(tmp_path: Path) -> None:
    def train_here(config: dict[str, Any]) -> str:
        drivetrain.report(lr=config["lr"])
        return ScalingConfig.__name__

    trainer = DataParallelTrainer(
        train_here,
        train_loop_config={"lr": 0.1, "config": RunConfig(), "reports_with": drivetrain.report},
        backend_config=BackendConfig(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, failure_config=FailureConfig()),
        metadata={"of": "a test"},
    )
    trainer.fit()
    assert b"drivetrain._" not in (tmp_path / "run" / "trainer.pkl").read_bytes()
    assert DataParallelTrainer.restore(tmp_path / "run").given["train_loop_config"]["reports_with"] is drivetrain.report


def test_code_keeps_its_file_name() -> None:
    def outer() -> Any:
        return lambda: None

    made = pickle.loads(dumps(outer))
    assert (made.__code__.co_filename, made().__code__.co_filename) == (__file__, __file__)
