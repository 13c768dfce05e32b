"""What the jobs that save checkpoints share: the copies and links around a report, and how long something takes."""

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
    """How long a call takes."""
    before = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - before


def copy(source: Path, target: Path) -> None:
    """A copy as a person would make it."""
    subprocess.run(["cp", "-r", source, target], check=True)


def link(source: Path, target: Path) -> Path:
    """A directory of its own with the same files, to be given away."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def warm(source: Path) -> None:
    """Has all of a directory in the page cache."""
    for path in source.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def clear(*directories: Path) -> None:
    """Deletes what was written, and has nothing be left to write to the disk, so that the next one begins alike."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    os.sync()


def in_turn(config: dict[str, Any], case: str, calls: dict[str, Callable[[], float]]) -> None:
    """Has every side measure as often as the options say, in turned order every other time, and stamps its values."""
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
    """Waits until what was reported to drivetrain last is uploaded and committed in a local storage; its directory.

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
