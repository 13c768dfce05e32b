"""Wrong: dropout draws from a random state that is not saved."""

from shared import run_torch, train_torch


def train_func():
    train_torch(dropout=0.5)


if __name__ == "__main__":
    run_torch(train_func)
