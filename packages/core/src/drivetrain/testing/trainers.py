"""The conformance kit for trainers, as tests that a plugin inherits.

A plugin author writes a class with two attributes and one method, and pytest collects the tests::

    from drivetrain.testing import TrainerConformance

    class TestMyTrainer(TrainerConformance):
        trainer = MyTrainer
        name = "my"  # the name of the entry point

        def arguments(self):
            return {"train_loop_per_worker": train, "train_loop_config": {"lr": 0.1}}
"""

from __future__ import annotations

from typing import Any, ClassVar

from drivetrain._driver.trainer import DataParallelTrainer
from drivetrain.testing.conformance import check_overrides

__all__ = ["TrainerConformance"]


class TrainerConformance:
    """Tests of a trainer. Derive a class from it, set :attr:`trainer` and :attr:`name`, and define :meth:`arguments`.

    Attributes:
        trainer: the class of the trainer.
        name: the name of its entry point in ``drivetrain.trainers``; None if it is not registered. The tests that need
            the entry point are then skipped.
        num_workers: the number of local workers of each run.
        forwards_keywords: True if the constructor accepts unknown keyword arguments, for example because it passes
            them on to the framework.
    """

    trainer: ClassVar[type[DataParallelTrainer]]
    name: ClassVar[str | None] = None
    num_workers: ClassVar[int] = 1
    forwards_keywords: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        trainer = getattr(cls, "trainer", None)
        if not isinstance(trainer, type) or not issubclass(trainer, DataParallelTrainer):
            raise TypeError(f"{cls.__name__}: expected an attribute `trainer` with a DataParallelTrainer class")
        check_overrides(cls, TrainerConformance)

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments for a small training that reports at least once, by name.

        The kit adds ``scaling_config`` and ``run_config``.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method arguments()")
