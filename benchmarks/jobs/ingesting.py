"""The loop of the jobs of the benchmark ``ingest``: two epochs over batches of tensors, timed."""

import os
import resource
import time
from collections.abc import Callable, Iterable

from stamps import stamp

BATCH_ROWS = 8_192
EPOCHS = 2


def read(config: dict, begin: Callable[[], Iterable[dict]]) -> None:
    """Read all epochs; stamp the number of rows and the duration of each."""
    stamp(config, "train_function")
    first = True
    for epoch in range(EPOCHS):
        rows, began = 0, time.perf_counter()
        for batch in begin():
            if first:
                stamp(config, "first_batch")
                first = False
            rows += len(batch["x0"])
            assert batch["x0"][-1].item() >= 0
        stamp(config, f"epoch_{epoch}", rows=rows, seconds=time.perf_counter() - began)
    stamp(config, "weighed", megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, worker=os.getpid())
