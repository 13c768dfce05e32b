"""After `fit`, `trainer.test()`, `validate` and `predict` work, with the best checkpoint of the run for "best"."""

# campaign: local; inprocess; ray

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from drivetrain import CheckpointConfig, RunConfig, ScalingConfig
from drivetrain_lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from drivetrain_torch import TorchTrainer


class Counter(BoringModel):
    """Its buffer is the number of trained batches. Its score is best after the second of three epochs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("score", abs(self.current_epoch - 1.0))

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.batches)

    def test_step(self, batch, batch_idx):
        self.log("tested", self.batches)

    def predict_step(self, batch, batch_idx):
        return self.batches.item()


def train():
    trainer = pl.Trainer(
        max_epochs=3,
        limit_train_batches=2,
        limit_val_batches=1,
        limit_test_batches=1,
        limit_predict_batches=1,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    model = Counter()
    prepare_trainer(trainer).fit(model)
    return {
        "test": trainer.test(model)[0]["tested"],
        "test, last": trainer.test(model, ckpt_path="last")[0]["tested"],
        "test, best": trainer.test(model, ckpt_path="best")[0]["tested"],
        "test without a model": trainer.test()[0]["tested"],
        "validate, best": trainer.validate(model, ckpt_path="best")[0]["validated"],
        "predict, best": trainer.predict(model, ckpt_path="best")[0],
    }


if __name__ == "__main__":
    runtime = sys.argv[1]
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=0 if runtime == "inprocess" else 2, runtime=runtime),
        run_config=RunConfig(
            verbose=0,
            checkpoint_config=CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="score", checkpoint_score_order="min"
            ),
        ),
    )
    batches = trainer.fit().return_value
    print(batches)
    sys.exit(batches != {name: 6 if name in ("test", "test, last") else 4 for name in batches})
