"""The conformance kits applied to the Horovod backend and its trainer."""

from typing import Any

import drivetrain
from drivetrain_horovod import HorovodConfig, HorovodTrainer
from drivetrain_testing import BackendConformance, TrainerConformance


def all_sum(value: float) -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return float(hvd.allreduce(torch.tensor(value), op=hvd.Sum))


class TestHorovod(BackendConformance):
    config = HorovodConfig(timeout_s=30)
    framework = "horovod"
    all_sum = staticmethod(all_sum)


class TestElasticHorovod(BackendConformance):
    config = HorovodConfig(elastic=True, timeout_s=30)
    framework = "horovod"
    all_sum = staticmethod(all_sum)


def train(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["loss"]})


class TestHorovodTrainer(TrainerConformance):
    trainer = HorovodTrainer
    name = "horovod"

    def arguments(self) -> dict[str, Any]:
        config = HorovodConfig(timeout_s=30)
        return {"train_loop_per_worker": train, "train_loop_config": {"loss": 0.5}, "horovod_config": config}
