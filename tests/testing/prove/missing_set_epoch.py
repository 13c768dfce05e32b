"""Wrong: after a restart, the epochs are counted from 0 again."""

from shared import run_torch, train_torch


def train_func():
    train_torch(shift_epochs=1)


if __name__ == "__main__":
    run_torch(train_func)
