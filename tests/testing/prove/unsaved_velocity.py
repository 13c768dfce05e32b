"""Wrong: the velocity of a hand-written optimizer is not saved."""

from shared import EPOCHS, load, run, save


def train_func():
    weight, velocity, first = 0.0, 0.0, 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        gradient = 2 * (weight - 3)
        velocity = 0.5 * velocity - 0.1 * gradient
        weight += velocity
        save({"weight": weight}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
