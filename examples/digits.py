"""Train a small convolutional network on handwritten digits, with two workers.

python examples/digits.py --runtime local --num-workers 2
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import drivetrain
from drivetrain import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, enable_reproducibility, prepare_data_loader, prepare_model


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
    model = make_model()
    parallel_model = prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    epochs_done = 0

    if checkpoint := drivetrain.get_checkpoint():  # after a retry, or with RunConfig(resume=...)
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epochs_done = state["epoch"]

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        loader.set_epoch(epoch)
        for images, digits in loader:
            loss = nn.functional.cross_entropy(parallel_model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        metrics = {"epoch": epoch, "loss": loss, "accuracy": accuracy(model, test_set)}
        with TemporaryDirectory() as directory:
            checkpoint = None
            if drivetrain.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(directory, "state.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            drivetrain.report(metrics, checkpoint, reduce={"loss": "mean"})


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
    with result.get_best_checkpoint("accuracy").as_directory() as directory:
        model.load_state_dict(torch.load(Path(directory, "state.pt"), weights_only=True)["model"])
    test_accuracy = accuracy(model, make_datasets()[1])
    print(f"The best checkpoint classifies {test_accuracy:.1%} of the test digits correctly.")
    print(f"The run directory is {result.path}")
    return 0 if test_accuracy >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
