"""Wrong: the checkpoints are in the middle of an epoch, which starts with its first row again after a restart."""

from shared import load, run, save

from drivetrain.plugin.datasets import note_batch


def train_func():
    weight, done = 0.0, 0
    if (state := load()) is not None:
        weight, done = state["weight"], state["done"]
    batches = [list(range(start, start + 5)) for start in range(0, 60, 5)]
    for number, batch in enumerate(batches[: len(batches) - done]):
        note_batch(batch, number)
        weight = 0.9 * weight + sum(batch)
        done += 1
        if done % 2 == 0:
            save({"weight": weight}, {"weight": weight, "done": done})


if __name__ == "__main__":
    run(train_func)
