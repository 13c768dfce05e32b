"""Wrong: every rank has its own weight, and after a restart all ranks load that of rank 0."""

from shared import EPOCHS, load, rank, run, save


def train_func():
    weight, first = float(rank()), 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        weight += 0.1 * (3 + rank() - weight)
        save({"weight": weight}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
