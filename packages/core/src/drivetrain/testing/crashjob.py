"""The small job that the crash harness ends in many ways, and the pattern of a job of your own for it.

Each rank adds a link to a chain of hashes per step, and reports it with a checkpoint that holds the chain's state, a
file that every rank has, and one that is big enough to be caught half-way. The uploads take turns in how they are done.
Whoever continues recomputes everything that it finds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import drivetrain

__all__ = ["main", "train"]

_BIG_BYTES = 200_000
_NAMED_EVERY = 5


def train(config: dict[str, Any]) -> str:
    """Goes on from the checkpoint, if there is one, to the last step.

    Args:
        config: ``steps``, how many there are, and ``world_size``.
    """
    rank = drivetrain.get_context().get_world_rank()
    step = _restore(config["world_size"])
    while step < config["steps"]:
        step += 1
        directory = Path(tempfile.mkdtemp(prefix=f"step_{step}_"))
        for name, content in _files_of(rank, step).items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        drivetrain.report(
            {"step": step, "state": _state(rank, step)},
            drivetrain.Checkpoint.from_directory(directory),
            checkpoint_dir_name=None if step % _NAMED_EVERY else f"step_{step}",
            checkpoint_upload_mode="async" if step % 4 in (2, 3) else "sync",
            delete_local_checkpoint_after_upload=step % 2 == 0,
        )
    return _state(rank, step)


def _restore(world_size: int) -> int:
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as path:
        found = {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}
    step = int(json.loads(found["rank_0/state.json"])["step"])
    for rank in range(world_size):
        for name, content in _files_of(rank, step).items():
            if found.get(name) != content:
                raise RuntimeError(f"{checkpoint.path}: {name} is not what rank {rank} has stored with step {step}")
    return step


def _state(rank: int, step: int) -> str:
    state = f"rank {rank}"
    for number in range(1, step + 1):
        state = hashlib.sha256(f"{state} {number}".encode()).hexdigest()
    return state


def _files_of(rank: int, step: int) -> dict[str, bytes]:
    state = _state(rank, step)
    return {
        f"rank_{rank}/state.json": json.dumps({"step": step, "state": state}).encode(),
        f"rank_{rank}/weights.bin": hashlib.shake_128(state.encode()).digest(_BIG_BYTES),
        "shared.txt": f"what every rank has after step {step}".encode(),
    }


def main() -> None:
    """Runs the job where ``DRIVETRAIN_STORAGE_PATH`` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    drivetrain.DataParallelTrainer(
        train,
        train_loop_config={"steps": chosen.steps, "world_size": chosen.workers},
        scaling_config=drivetrain.ScalingConfig(num_workers=chosen.workers, runtime="local"),
        run_config=drivetrain.RunConfig(
            name="run",
            resume="auto",
            checkpoint_config=drivetrain.CheckpointConfig(num_to_keep=2, checksums=True),
            failure_config=drivetrain.FailureConfig(max_failures=10),
            start_timeout_s=30,
        ),
    ).fit()


if __name__ == "__main__":
    main()
