"""Right, but not what was meant: without ``set_epoch``, every epoch has the same order."""

from shared import run_torch, train_torch


def train_func():
    train_torch(momentum=0.9, decay=0.8, fixed_order=True)


if __name__ == "__main__":
    run_torch(train_func)
