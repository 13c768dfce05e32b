import lightning
import torch
from drivetrain import FailureConfig, RunConfig, ScalingConfig
from drivetrain_lightning import RayDDPStrategy, RayLightningEnvironment
from drivetrain_lightning import RayTrainReportCallback, prepare_trainer
from drivetrain_torch import TorchTrainer
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = cross_entropy(self.layer(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    trainer = lightning.Trainer(
        max_epochs=5,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
    )
    loader = DataLoader(data, batch_size=32, shuffle=True)
    prepare_trainer(trainer).fit(Digits(), loader)


workers = ScalingConfig(num_workers=8, use_gpu=True)
retries = RunConfig(failure_config=FailureConfig(max_failures=3))
result = TorchTrainer(train, scaling_config=workers, run_config=retries).fit()
print(result.metrics, result.checkpoint)
