"""Wrong: a metric is a duration."""

import time

from shared import EPOCHS, load, run, save


def train_func():
    weight, first = 0.0, 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        started = time.perf_counter()
        weight += 0.1 * (3 - weight)
        save({"weight": weight, "seconds": time.perf_counter() - started}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
