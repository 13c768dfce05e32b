"""Steps under Lightning Fabric, on drivetrain."""

from fabrics import train
from lightning.fabric import Fabric
from stamps import options

from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer


def train_func(config):
    fabric = Fabric(accelerator="cpu")
    fabric.launch()
    train(fabric, config)


if __name__ == "__main__":
    config = options(steps=800)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
