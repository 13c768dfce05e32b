"""Right: it saves within epochs, and continues with the next batch."""

import json
import tempfile
from pathlib import Path

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, ScalingConfig
from drivetrain.plugin.datasets import note_batch

BATCHES = 5


def train_func():
    total, first = 0, 0
    if checkpoint := drivetrain.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = json.loads(Path(directory, "state.json").read_text())
        total, first = state["total"], state["step"] + 1
    for step in range(first, 3 * BATCHES):
        batch = [step, step + 1]
        note_batch(batch, step % BATCHES)
        total += sum(batch)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state.json").write_text(json.dumps({"total": total, "step": step}))
            drivetrain.report({"total": total}, Checkpoint.from_directory(directory))


if __name__ == "__main__":
    DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=1)).fit()
