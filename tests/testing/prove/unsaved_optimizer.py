"""Wrong: the momentum of the optimizer is not saved."""

from shared import run_torch, train_torch


def train_func():
    train_torch(momentum=0.9, leave_out=["optimizer"])


if __name__ == "__main__":
    run_torch(train_func)
