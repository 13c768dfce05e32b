"""Shared by the jobs: options, and time stamps in a file that the benchmark reads."""

import argparse
import json
import os
import time
from typing import Any


def options(**defaults: Any) -> dict[str, Any]:
    """Return the options of a job by name, with their defaults, and the options that every job has."""
    parser = argparse.ArgumentParser()
    for name, default in {"stamps": "", "storage": "", "hold": "", **defaults}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return vars(parser.parse_args())


def stamp(config: dict[str, Any], name: str, **facts: Any) -> None:
    """Stamp the time at which this process reaches a point."""
    line = json.dumps({"name": name, "time": time.time(), "pid": os.getpid(), **facts})
    file = os.open(config["stamps"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def hold(config: dict[str, Any]) -> None:
    """Wait at a point until the benchmark has measured the memory of the processes, if configured."""
    if config["hold"]:
        stamp(config, "held")
        while not os.path.exists(config["hold"]):
            time.sleep(0.02)


def end(config: dict[str, Any], rank: int) -> None:
    """Leave the train function; with ``--fail 1`` rank 1 raises, while the other ranks loop for a minute."""
    if config["fail"] and rank != 1:
        time.sleep(60)
    stamp(config, "leaving")
    if config["fail"]:
        raise RuntimeError("requested by the benchmark")
