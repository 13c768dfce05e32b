"""The conformance kit for trainables, as tests that a plugin inherits.

A plugin author writes a class with one attribute and one method, and pytest collects the tests::

    from drivetrain.testing import TrainableConformance

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

from drivetrain.testing.conformance import check_overrides

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
