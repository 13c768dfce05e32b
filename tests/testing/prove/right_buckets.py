"""Right: three workers, and ``exact=True`` keeps the order in which the gradients are added."""

from shared import run_torch, train_wide


def train_func():
    train_wide(exact=True)


if __name__ == "__main__":
    run_torch(train_func, num_workers=3)
