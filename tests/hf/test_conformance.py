"""The conformance kits applied to the backend of an ``AccelerateTrainer``, and to both trainers."""

from typing import Any

import drivetrain
from drivetrain import RunConfig
from drivetrain_hf._accelerate import AccelerateConfig
from drivetrain_hf.accelerate import AccelerateTrainer
from drivetrain_hf.transformers import TransformersTrainer
from drivetrain_testing import BackendConformance, TrainerConformance
from drivetrain_torch import TorchConfig
from tests.hf.trainers import make_trainer


class TestAccelerate(BackendConformance):
    config = AccelerateConfig(torch=TorchConfig(), accelerate={"distributed_type": "NO"})
    framework = "torch"

    @staticmethod
    def all_sum(value: float) -> float:
        import torch
        from accelerate import Accelerator

        return Accelerator().reduce(torch.tensor([value])).item()


def train(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["loss"]})


class TestAccelerateTrainer(TrainerConformance):
    trainer = AccelerateTrainer
    name = "accelerate"

    def arguments(self) -> dict[str, Any]:
        config = {"distributed_type": "NO", "mixed_precision": "bf16"}
        return {"train_loop_per_worker": train, "train_loop_config": {"loss": 0.5}, "accelerate_config": config}


def init(training: Any, evaluation: Any, *, steps: int) -> Any:
    trainer = make_trainer(training, 10, max_steps=steps, save_strategy="steps", save_steps=1)
    trainer.train_dataset = training
    return trainer


class TestTransformersTrainer(TrainerConformance):
    trainer = TransformersTrainer
    name = "transformers"

    def arguments(self) -> dict[str, Any]:
        rows = [{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": row % 2} for row in range(8)]
        return {
            "trainer_init_per_worker": init,
            "trainer_init_config": {"steps": 2},
            "datasets": {"train": rows},
            "run_config": RunConfig(
                verbose=0, worker_output="none", preload=("tests.without_mlflow", "transformers.trainer", "deepspeed")
            ),
        }
