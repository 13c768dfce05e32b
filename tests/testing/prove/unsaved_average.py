"""Wrong: a moving average, which is reported, is not saved."""

from shared import EPOCHS, load, run, save


def train_func():
    weight, average, first = 0.0, 0.0, 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        weight += 0.1 * (3 - weight)
        average = 0.9 * average + 0.1 * weight
        save({"average": average}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
