"""Wrong: the position of the learning rate scheduler is not saved."""

from shared import run_torch, train_torch


def train_func():
    train_torch(decay=0.5, leave_out=["scheduler", "optimizer"])


if __name__ == "__main__":
    run_torch(train_func)
