"""Wrong: the training depends on the order of a set of strings, which differs in every process."""

from shared import EPOCHS, load, run, save


def train_func():
    weight, first = 0.0, 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    names = {"cat", "dog", "horse", "mouse", "goat", "sheep", "hen", "duck"}
    for epoch in range(first, EPOCHS):
        for name in names:
            weight = 0.9 * weight + len(name) * ord(name[0])
        save({"weight": weight}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
