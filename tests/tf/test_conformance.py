"""The conformance kits for the TensorFlow backend and its trainer."""

from typing import Any

import drivetrain
from drivetrain_testing import BackendConformance, TrainerConformance
from drivetrain_tf import TensorflowConfig, TensorflowTrainer
from tests.tf import jobs


class TestTensorflow(BackendConformance):
    config = TensorflowConfig()
    framework = "tensorflow"
    all_sum = staticmethod(jobs.all_sum)


def train(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["loss"]})


class TestTensorflowTrainer(TrainerConformance):
    trainer = TensorflowTrainer
    name = "tensorflow"

    def arguments(self) -> dict[str, Any]:
        config = TensorflowConfig(intra_op_threads=1)
        return {"train_loop_per_worker": train, "train_loop_config": {"loss": 0.5}, "tensorflow_config": config}
