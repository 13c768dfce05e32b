"""The loop of the jobs that train while a checkpoint is uploaded: steps per second with and without an upload."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ddp import WARMUP_STEPS, backward, make_batch, make_model
from saving import clear, link, seconds
from stamps import stamp


def train(
    config: dict[str, Any],
    report: Callable[[Path], None],
    is_stored: Callable[[], bool],
    settle: Callable[[], None],
) -> None:
    """Stamp the steps per second just before and after an upload, those during it, and the duration of the report.

    Args:
        config: the options.
        report: starts to store a directory, which is given away.
        is_stored: returns True once it is stored.
        settle: cleans up; not timed.
    """
    model = make_model(width=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = make_batch(0)

    def steps_per_second(should_continue: Callable[[], bool]) -> float:
        count, started = 0, time.perf_counter()
        while should_continue():
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            count += 1
        return count / (time.perf_counter() - started)

    def alone() -> float:
        until = time.perf_counter() + config["seconds"]
        return steps_per_second(lambda: time.perf_counter() < until)

    warmup = iter(range(WARMUP_STEPS))
    steps_per_second(lambda: next(warmup, None) is not None)
    for number in range(config["repeats"]):
        source = link(Path(config["data"]), Path(config["give"]) / f"given{number}")
        before = alone()
        blocked = seconds(report, source)
        began = time.perf_counter()
        during = steps_per_second(lambda: not is_stored())
        uploaded = time.perf_counter() - began
        after = alone()
        stamp(
            config, "trained", during=during, alone=(before + after) / 2, report_ms=blocked * 1e3, upload_s=uploaded
        )  # fmt: skip
        settle()
        clear(source)
