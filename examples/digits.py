"""Train a small convolutional network on handwritten digits, with two workers.

python examples/digits.py --runtime local --num-workers 2
"""

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, TrainState, enable_reproducibility, prepare_data_loader, prepare_model


def make_datasets():
    """Return 1,797 scans of 8 x 8 pixels with their labels, split into four fifths for training and one for testing."""
    images, digits = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(digits))
    return random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))


def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
    )


@torch.no_grad()
def accuracy(model, dataset):
    images, digits = dataset[:]
    return (model(images).argmax(dim=1) == digits).float().mean().item()


def train_func(config):
    enable_reproducibility(seed=0)
    train_set, test_set = make_datasets()
    loader = prepare_data_loader(DataLoader(train_set, batch_size=32, shuffle=True))
    model = prepare_model(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = TrainState(model=model, optimizer=optimizer, loader=loader)  # restores itself after a retry

    for epoch in state.epochs(config["epochs"]):
        for images, digits in loader:
            loss = nn.functional.cross_entropy(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
        metrics = {"epoch": epoch + 1, "loss": loss, "accuracy": accuracy(model.module, test_set)}
        state.save(metrics, reduce={"loss": "mean"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=["local", "ray", "inprocess"], default="local")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--storage-path", help="the parent of the run directory (default: ~/drivetrain_results)")
    options = parser.parse_args()

    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(
            num_workers=0 if options.runtime == "inprocess" else options.num_workers,
            runtime=options.runtime,
        ),
        run_config=RunConfig(
            storage_path=options.storage_path,
            checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy"),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()

    model = make_model()
    TrainState(model=model).load(result.get_best_checkpoint("accuracy"))
    test_accuracy = accuracy(model, make_datasets()[1])
    print(f"The best checkpoint classifies {test_accuracy:.1%} of the test digits correctly.")
    print(f"The run directory is {result.path}")
    return 0 if test_accuracy >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
