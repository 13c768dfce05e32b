"""Steps in JAX on drivetrain, with a report of each."""

from stamps import options

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_jax import JaxTrainer


def train_func(config):
    from jaxed import train

    train(config, drivetrain.report)


if __name__ == "__main__":
    config = options(steps=800)
    JaxTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, runtime="local", resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=config["storage"], worker_output="none"),
    ).fit()
