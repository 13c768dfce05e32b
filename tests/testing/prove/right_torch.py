"""Right: model, optimizer and scheduler are in the checkpoint, and each epoch has its own order."""

from shared import run_torch, train_torch


def train_func():
    train_torch(momentum=0.9, decay=0.8)


if __name__ == "__main__":
    run_torch(train_func)
