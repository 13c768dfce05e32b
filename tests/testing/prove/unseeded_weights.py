"""Wrong: the weights are initialized at random, without a seed."""

import random

from shared import EPOCHS, load, run, save


def train_func():
    weight, first = random.random(), 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        weight += 0.1 * (3 - weight)
        save({"weight": weight}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
