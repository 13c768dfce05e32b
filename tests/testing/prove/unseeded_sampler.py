"""Wrong: the rows are shuffled without a seed."""

import random

from shared import EPOCHS, load, run, save

from drivetrain.plugin.datasets import note_batch


def train_func():
    weight, first = 0.0, 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        rows = list(range(20))
        random.shuffle(rows)
        for number, start in enumerate(range(0, 20, 5)):
            batch = rows[start : start + 5]
            note_batch(batch, number)
            weight = 0.9 * weight + sum(batch)
        save({"weight": weight}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
