"""The default job of the crash harness, and a template for your own job.

In each step, each rank extends a chain of hashes, and reports its state with a checkpoint. The checkpoint contains the
state, a file that is equal on all ranks, and a file so large that a crash can interrupt its upload. The steps use both
upload modes in turn, and every third step uses a shared checkpoint. A resumed job recomputes all files of the
checkpoint, and compares them with the stored files.
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
    """Run all steps, or only the steps after the checkpoint if there is one.

    Args:
        config: ``steps``, the number of steps, and ``world_size``.

    Returns:
        The state of the rank after the last step.
    """
    rank = drivetrain.get_context().get_world_rank()
    step = _restore(config["world_size"])
    while step < config["steps"]:
        step += 1
        mode = drivetrain.CheckpointUploadMode.ASYNC if step % 4 in (2, 3) else drivetrain.CheckpointUploadMode.SYNC
        metrics = {"step": step, "state": _state(rank, step)}
        if step % 3 == 0:
            with drivetrain.shared_checkpoint() as checkpoint:
                _write_files(Path(checkpoint.path), rank, step)
                drivetrain.report(metrics, checkpoint, checkpoint_upload_mode=mode)
            continue
        directory = Path(tempfile.mkdtemp(prefix=f"step_{step}_"))
        _write_files(directory, rank, step)
        drivetrain.report(
            metrics,
            drivetrain.Checkpoint.from_directory(directory),
            checkpoint_dir_name=None if step % _NAMED_EVERY else f"step_{step}",
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=step % 2 == 0,
        )
    return _state(rank, step)


def _write_files(directory: Path, rank: int, step: int) -> None:
    for name, content in _files_of(rank, step).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def _restore(world_size: int) -> int:
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as path:
        files = {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}
    step = int(json.loads(files["rank_0/state.json"])["step"])
    for rank in range(world_size):
        for name, content in _files_of(rank, step).items():
            if files.get(name) != content:
                raise RuntimeError(
                    f"{checkpoint.path}: {name} differs from the file that rank {rank} stored in step {step}"
                )
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
        "shared.txt": f"the same on every rank after step {step}".encode(),
    }


def main() -> None:
    """Run the job, with its run directory in ``DRIVETRAIN_STORAGE_PATH``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    drivetrain.DataParallelTrainer(
        train,
        train_loop_config={"steps": options.steps, "world_size": options.workers},
        scaling_config=drivetrain.ScalingConfig(num_workers=options.workers, runtime="local"),
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
