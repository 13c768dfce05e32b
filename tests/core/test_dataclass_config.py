"""The config of a train function may be an object of a dataclass."""

from __future__ import annotations

import argparse
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Callback, ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig, SerializationError
from drivetrain.plugin import Run
from drivetrain.runs import open_run
from drivetrain_interactive import Trainer


@dataclass(frozen=True, slots=True)
class Options:
    lr: float = 0.1
    epochs: int = 2
    api_key: str = "hunter2"


@dataclass
class Mutable:
    layers: list[int] = field(default_factory=lambda: [1])
    name: str = "first"


class KeepsConfig(Callback):
    """Keeps the config that callbacks see."""

    def __init__(self) -> None:
        self.seen: object = None

    def on_run_start(self, run: Run) -> None:
        self.seen = run.train_loop_config


def train(options: Options) -> tuple[str, float, int]:
    for epoch in range(options.epochs):
        drivetrain.report(epoch=epoch)
    return type(options).__name__, options.lr, options.epochs


def make_trainer(directory: Path, workers: int = 0, *callbacks: Callback) -> DataParallelTrainer:
    return DataParallelTrainer(
        train,
        train_loop_config=Options(lr=0.5),
        scaling_config=ScalingConfig(num_workers=workers, runtime="local" if workers else None),
        run_config=RunConfig(name="run", storage_path=directory, verbose=0, callbacks=callbacks),
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_train_function_receives_an_equal_object(tmp_path: Path, workers: int) -> None:
    assert make_trainer(tmp_path, workers).fit().return_value == ("Options", 0.5, 2)


def test_run_directory_and_callbacks_have_the_fields_by_name(tmp_path: Path) -> None:
    callback = KeepsConfig()
    make_trainer(tmp_path, 0, callback).fit()
    assert callback.seen == {"lr": 0.5, "epochs": 2, "api_key": "hunter2"}
    assert (
        open_run(tmp_path / "run").record().facts["train_loop_config"] == "{'lr': 0.5, 'epochs': 2, 'api_key': '***'}"
    )


def test_restored_trainer_has_the_object_and_another_one_can_be_passed(tmp_path: Path) -> None:
    make_trainer(tmp_path).fit()
    restored = drivetrain.restore(tmp_path / "run")
    assert restored.given["train_loop_config"] == Options(lr=0.5)
    changed = drivetrain.restore(tmp_path / "run", train_loop_config=Options(epochs=3))
    assert changed.fit().return_value == ("Options", 0.1, 3)


def test_trial_changes_single_fields(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    varied = trainer.vary({"train_loop_config": {"epochs": 1}}, run_config=RunConfig(storage_path=tmp_path, verbose=0))
    assert varied.fit().return_value == ("Options", 0.5, 1)
    with pytest.raises(ConfigurationError, match=r"expected fields of Options \(lr, epochs, api_key\), got 'epoch'"):
        trainer.vary({"train_loop_config": {"epoch": 1}})


def test_interactive_trainer_passes_the_object(tmp_path: Path) -> None:
    with Trainer("none", num_workers=0, logdir=tmp_path) as trainer:
        assert trainer.run(train, Options(lr=0.2)) == [("Options", 0.2, 2)]


def test_train_function_cannot_change_the_object_of_the_driver(tmp_path: Path) -> None:
    given = Mutable()

    def change(options: Mutable) -> int:
        options.layers.append(2)
        return len(options.layers)

    trainer = DataParallelTrainer(
        change,
        train_loop_config=given,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    )
    given.name = "second"
    assert trainer.fit().return_value == 2
    assert given.layers == [1]


def test_field_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Holder:
        lock: object

    def use(options: Holder) -> None:
        print(options.lock)

    trainer = DataParallelTrainer(
        use,
        train_loop_config=Holder(threading.Lock()),
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    )
    with pytest.raises(SerializationError, match=r"train_loop_config\.lock \(a lock\) cannot be pickled"):
        trainer.fit()


def test_class_and_other_objects_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expected a dict or a dataclass, got <class .*Options'>$"):
        DataParallelTrainer(train, train_loop_config=Options)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match=r"got Namespace\(lr=1\)\. Pass vars\(\.\.\.\) of it"):
        DataParallelTrainer(train, train_loop_config=argparse.Namespace(lr=1))  # type: ignore[type-var]
