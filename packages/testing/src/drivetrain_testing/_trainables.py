"""The conformance kit for trainables, as tests that a plugin inherits.

A plugin author writes a class with one attribute and one method, and pytest collects the tests::

    from drivetrain_testing import TrainableConformance

    class TestMyTrainable(TrainableConformance):
        name = "my-tuner"  # its entry point in drivetrain.trainables

        def run_trial(self, trainable, config, directory):
            return my_tuner.run(trainable, config, storage=directory).last_report

A test that cannot pass for a plugin must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig, report
from drivetrain.plugin import load_plugin
from drivetrain.plugin.checks import one_line
from drivetrain_testing._checks import check_equal, forget_test_name
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._retriedjob import IntendedError

__all__ = ["TrainableConformance"]


class TrainableConformance:
    """Tests of a function that adapts trainers to another system. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.trainables``.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        if cls.run_trial is TrainableConformance.run_trial:
            raise TypeError(f"{cls.__name__}: expected a method run_trial(trainable, config, directory), got none")
        check_overrides(cls, TrainableConformance)

    def run_trial(
        self, trainable: Callable[[dict[str, Any]], Any], config: dict[str, Any], directory: Path
    ) -> Mapping[str, Any]:
        """Make the other system run one trial, and return the metrics of its last report.

        Args:
            trainable: what the function has returned.
            config: the config of the trial.
            directory: an empty directory for the system's files.

        Raises:
            Exception: the trial has failed.
        """
        raise NotImplementedError

    def test_returns_a_trainable_and_starts_nothing(self, tmp_path: Path) -> None:
        trainer = _make_trainer(tmp_path)
        before = repr(trainer.given)
        trainable = self._make(trainer)
        assert callable(trainable), f"expected a trainable that can be called with a config, got {trainable!r}"
        check_equal("the arguments of the trainer afterwards", repr(trainer.given), before)
        written = sorted(path.name for path in tmp_path.iterdir())
        assert not written, f"expected that no run is started before the trials, got {', '.join(written)}"

    def test_trial_merges_its_config_into_the_arguments_of_the_trainer(self, tmp_path: Path) -> None:
        trainable = self._make(_make_trainer(tmp_path))
        metrics = self.run_trial(trainable, {"train_loop_config": {"lr": 0.5}}, tmp_path / "system")
        check_equal("the value that the trial changes", metrics.get("lr"), 0.5)
        check_equal("the value that the trial leaves unchanged", metrics.get("steps"), 2)

    def test_config_of_a_trial_can_be_one_argument(self, tmp_path: Path) -> None:
        trainable = self._make(_make_trainer(tmp_path), argument="train_loop_config")
        metrics = self.run_trial(trainable, {"lr": 0.25}, tmp_path / "system")
        check_equal("the value that the trial changes", metrics.get("lr"), 0.25)

    def test_trial_reports_its_failure(self, tmp_path: Path) -> None:
        trainable = self._make(_make_trainer(tmp_path))
        with pytest.raises(Exception, match="requested by the conformance kit"):
            self.run_trial(trainable, {"train_loop_config": {"fails": True}}, tmp_path / "system")

    def test_trial_rejects_an_unknown_argument(self, tmp_path: Path) -> None:
        trainable = self._make(_make_trainer(tmp_path))
        with pytest.raises(Exception, match="no_such_argument"):
            self.run_trial(trainable, {"no_such_argument": 1}, tmp_path / "system")

    def _make(self, trainer: DataParallelTrainer, argument: str | None = None) -> Any:
        try:
            return load_plugin("trainable", self.name)(trainer, argument=argument, autoscaling=False)
        except TypeError as error:
            pytest.fail(
                f"expected a function with the parameters (trainer, *, argument, autoscaling), got {one_line(error)}"
            )


def _make_trainer(directory: Path) -> DataParallelTrainer:
    forget_test_name()
    return DataParallelTrainer(
        _train,
        train_loop_config={"lr": 0.1, "steps": 2, "fails": False},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=directory, verbose=0, worker_output="none"),
    )


def _train(config: dict[str, Any]) -> None:
    for _ in range(config["steps"]):
        report({"lr": config["lr"], "steps": config["steps"]})
    if config["fails"]:
        raise IntendedError("requested by the conformance kit")
