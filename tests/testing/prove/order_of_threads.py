"""Wrong: results of threads are combined in the order in which the threads end."""

import os
from concurrent.futures import ThreadPoolExecutor, as_completed

from shared import EPOCHS, load, run, save


def work(number):
    os.urandom(200_000 * (1 + os.urandom(1)[0] % 4))  # takes a time that varies
    return number


def train_func():
    weight, first = 0.0, 0
    if (state := load()) is not None:
        weight, first = state["weight"], state["epoch"] + 1
    with ThreadPoolExecutor(8) as threads:
        for epoch in range(first, EPOCHS):
            for each in as_completed([threads.submit(work, number) for number in range(40)]):
                weight = 0.9 * weight + each.result()
            save({"weight": weight}, {"weight": weight, "epoch": epoch})


if __name__ == "__main__":
    run(train_func)
