"""Helpers of the jobs that save checkpoints: copies and links around a report, and timing."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stamps import stamp

import drivetrain

DEADLINE_S = 120.0


def seconds(call: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Return the duration of a call."""
    before = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - before


def copy(source: Path, target: Path) -> None:
    """Copy a directory as a person would."""
    subprocess.run(["cp", "-r", source, target], check=True)


def link(source: Path, target: Path) -> Path:
    """Create a separate directory with the same files, to be given away."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def warm(source: Path) -> None:
    """Load all of a directory into the page cache."""
    for path in source.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def clear(*directories: Path) -> None:
    """Delete written files and flush the disk, so that every measurement begins in the same state."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    os.sync()


def in_turn(config: dict[str, Any], case: str, calls: dict[str, Callable[[], float]]) -> None:
    """Measure every side as often as configured, in reverse order every other time, and stamp the values."""
    for repeat in range(config["repeats"]):
        for side in list(calls) if repeat % 2 == 0 else reversed(calls):
            stamp(config, "measured", case=case, side=side, value=calls[side]())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} did not come true")
        time.sleep(0.005)


def wait_until_committed(before: drivetrain.Checkpoint | None) -> Path:
    """Wait until the last report to drivetrain is uploaded and committed in a local storage; return its directory.

    Args:
        before: the checkpoint that was the newest before the report.
    """
    wait_for(lambda: drivetrain.get_checkpoint() != before)
    directory = Path(drivetrain.get_checkpoint().path)
    manifest = directory.parent / "manifest.json"
    wait_for(lambda: manifest.exists() and directory.name in _names(manifest))
    return directory


def _names(manifest: Path) -> list[str]:
    return [entry["name"] for entry in json.loads(manifest.read_text())["checkpoints"]]
