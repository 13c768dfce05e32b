"""The conformance kits applied to the backend of an ``AccelerateTrainer``, and to preparing a ``Trainer``."""

from pathlib import Path
from typing import Any

import drivetrain
from drivetrain.testing import BackendConformance, PrepareConformance
from drivetrain_hf._accelerate import AccelerateConfig
from drivetrain_torch import TorchConfig


class TestAccelerate(BackendConformance):
    config = AccelerateConfig(torch=TorchConfig(), accelerate={"distributed_type": "NO"})
    runtimes = ("local",)

    @staticmethod
    def all_sum(value: float) -> float:
        import torch
        from accelerate import Accelerator

        return Accelerator().reduce(torch.tensor([value])).item()


class TestPrepare(PrepareConformance):
    name = "transformers"
    backend = TorchConfig()

    @staticmethod
    def make_objects() -> list[Any]:
        import torch
        from transformers import Trainer, TrainingArguments

        directory = str(Path(drivetrain.get_context().get_trial_dir(), "out"))
        arguments = TrainingArguments(output_dir=directory, use_cpu=True, report_to=[])
        return [Trainer(torch.nn.Linear(2, 1), arguments, train_dataset=[{"x": 1}])]
