"""The train function of the run that is stored in `run_v1`."""

import tempfile
from pathlib import Path

import drivetrain
from drivetrain import Checkpoint


def train() -> None:
    """Counts to two, or from a checkpoint to three. Every step reports a checkpoint, and the second one has a name."""
    checkpoint = drivetrain.get_checkpoint()
    start, end = 1, 2
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start, end = int(Path(directory, "step.txt").read_text()) + 1, 3
    for step in range(start, end + 1):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step.txt").write_text(str(step))
            name = "second" if step == 2 else None
            drivetrain.report({"step": step}, checkpoint=Checkpoint(directory), checkpoint_dir_name=name)
