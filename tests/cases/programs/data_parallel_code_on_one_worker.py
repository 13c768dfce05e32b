"""A train function for several workers also runs on one worker, and in the driver's process."""

# arguments: 0; 1; 2

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, prepare_data_loader, prepare_model


def train():
    model = prepare_model(torch.nn.Linear(2, 1))
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.rand(8, 2)), batch_size=2, shuffle=True))
    loader.sampler.set_epoch(1)
    with model.no_sync():
        model(next(iter(loader))[0]).sum().backward()
    return sorted(model.module.state_dict())


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=int(sys.argv[1])),
        run_config=RunConfig(verbose=0),
    )
    names = trainer.fit().return_value
    print(names)
    sys.exit(names != ["bias", "weight"])
