"""Wrong: only the parameters are saved, and not the running statistics of batch norm."""

from shared import run_torch, train_torch


def train_func():
    train_torch(batch_norm=True, only_parameters=True)


if __name__ == "__main__":
    run_torch(train_func)
