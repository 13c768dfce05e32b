"""Steps under Accelerate, on drivetrain."""

from accelerated import train
from stamps import options

from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer

if __name__ == "__main__":
    config = options(steps=800)
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
