"""The conformance kit applied to the function that prepares a ``Trainer`` of Transformers."""

from pathlib import Path
from typing import Any

import drivetrain
from drivetrain_testing import PrepareConformance
from drivetrain_torch import TorchConfig


class TestPrepare(PrepareConformance):
    name = "transformers"
    backend = TorchConfig()

    @staticmethod
    def make_objects() -> list[Any]:
        import torch
        from transformers import Trainer, TrainingArguments

        import tests.without_mlflow  # noqa: F401, because of DeepSpeed

        directory = str(Path(drivetrain.get_context().get_trial_dir(), "out"))
        arguments = TrainingArguments(output_dir=directory, use_cpu=True, report_to=[])
        return [Trainer(torch.nn.Linear(2, 1), arguments, train_dataset=[{"x": 1}])]
