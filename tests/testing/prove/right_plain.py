"""Right: gradient descent in plain Python. Everything that changes is in the checkpoint."""

import random

from shared import EPOCHS, load, rank, run, save


def train_func():
    weight, velocity, first = 0.0, 0.0, 0
    draws = random.Random(rank())
    name = f"state_{rank()}.json"
    if (state := load(name)) is not None:
        weight, velocity, first = state["weight"], state["velocity"], state["epoch"] + 1
        version, internal, gauss = state["draws"]
        draws.setstate((version, tuple(internal), gauss))
    for epoch in range(first, EPOCHS):
        gradient = 2 * (weight - 3) + draws.gauss(0, 0.1)
        velocity = 0.5 * velocity - 0.1 * gradient
        weight += velocity
        state = {"weight": weight, "velocity": velocity, "epoch": epoch, "draws": draws.getstate()}
        save({"weight": weight}, state, name, everywhere=True)


if __name__ == "__main__":
    run(train_func)
