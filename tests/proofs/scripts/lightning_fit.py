"""Lightning, with the report callback of drivetrain."""

import os

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from drivetrain_torch import TorchTrainer


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.network(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train_func():
    pl.seed_everything(0, verbose=False)
    rows = torch.randn(160, 16)
    data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
    trainer = pl.Trainer(
        max_epochs=8,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    loader = DataLoader(data, batch_size=10, shuffle=True)
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        trainer.fit(Regression(), loader)
        return
    with checkpoint.as_directory() as directory:
        path = os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME)
        trainer.fit(Regression(), loader, ckpt_path=path)


def make_trainer(scaling_config, **options):
    return TorchTrainer(
        train_func,
        scaling_config=scaling_config,
        run_config=RunConfig(worker_output="none", preload=["lightning.pytorch"], **options),
    )


if __name__ == "__main__":
    make_trainer(ScalingConfig(num_workers=2)).fit()
