"""Wrong: with three workers, DistributedDataParallel adds the gradients in another order after a restart."""

from shared import run_torch, train_wide


def train_func():
    train_wide(exact=False)


if __name__ == "__main__":
    run_torch(train_func, num_workers=3)
