"""Steps of a ``transformers.Trainer``, on Ray Train."""

from ray.train import RunConfig, ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from stamps import options
from tuning import make_trainer


def train_func(config):
    trainer = make_trainer(config)
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()


if __name__ == "__main__":
    config = options(steps=300)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
