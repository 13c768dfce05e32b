"""A Lightning training on Ray Train, with its callback."""

import ray.train
from fits import fit
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer
from stamps import options


def train_func(config):
    fit(
        config,
        ray.train.get_context().get_world_rank(),
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
