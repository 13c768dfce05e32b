"""A Lightning training on drivetrain, with the callback that reports and polls for preemptions."""

from fits import fit
from stamps import options

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback
from drivetrain_torch import TorchTrainer


def train_func(config):
    fit(
        config,
        drivetrain.get_context().get_world_rank(),
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
    )


if __name__ == "__main__":
    config = options(steps=800)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
