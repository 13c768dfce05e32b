"""Right: each epoch reads all rows, whatever the number of workers, and the weight depends only on the epoch."""

from shared import EPOCHS, load, rank, run, save

import drivetrain
from drivetrain.plugin.datasets import note_batch


def train_func():
    weight, first = 0.0, 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    size = drivetrain.get_context().get_world_size()
    for epoch in range(first, EPOCHS):
        note_batch(list(range(rank(), 30, size)))
        weight += 0.1 * (3 - weight)
        save({"weight": weight}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
