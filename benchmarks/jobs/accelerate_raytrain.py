"""Steps under Accelerate, on Ray Train."""

from accelerated import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from stamps import options

if __name__ == "__main__":
    config = options(steps=800)
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
