"""The conformance kit applied to the function that prepares a ``Trainer`` of Lightning."""

from typing import Any

from drivetrain_testing import PrepareConformance
from drivetrain_torch import TorchConfig


class TestPrepare(PrepareConformance):
    name = "lightning"
    backend = TorchConfig()

    @staticmethod
    def make_objects() -> list[Any]:
        from tests.lightning.jobs import make_trainer

        return [make_trainer()]
