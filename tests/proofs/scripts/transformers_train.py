"""The ``Trainer`` of Transformers, with the report callback of drivetrain."""

import contextlib
import os

import torch
from transformers import Trainer, TrainingArguments, set_seed

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_hf.transformers import RayTrainReportCallback, prepare_trainer
from drivetrain_torch import TorchTrainer


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))

    def forward(self, inputs, labels):
        outputs = self.network(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


def train_func():
    set_seed(0)
    rows = torch.randn(160, 16)
    data = [{"inputs": row, "labels": row.sum().reshape(1)} for row in rows]
    arguments = TrainingArguments(
        output_dir=os.path.join(drivetrain.get_context().get_trial_dir(), "trainer"),
        num_train_epochs=8,
        per_device_train_batch_size=10,
        learning_rate=1e-2,
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        average_tokens_across_devices=False,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=data)
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    with contextlib.ExitStack() as stack:
        path = None
        if (checkpoint := drivetrain.get_checkpoint()) is not None:
            directory = stack.enter_context(checkpoint.as_directory())
            path = os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME)
        trainer.train(resume_from_checkpoint=path)


def make_trainer(scaling_config, **options):
    return TorchTrainer(
        train_func,
        scaling_config=scaling_config,
        run_config=RunConfig(worker_output="none", preload=["transformers.trainer"], **options),
    )


if __name__ == "__main__":
    make_trainer(ScalingConfig(num_workers=2)).fit()
