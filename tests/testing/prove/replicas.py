"""Wrong: each rank has its own statistics of batch norm, and those of rank 0 are saved."""

from shared import run_torch, train_torch


def train_func():
    train_torch(batch_norm=True, broadcast_buffers=False)


if __name__ == "__main__":
    run_torch(train_func)
