"""Every rank reports `model.pt`, as the quickstart of the reference does: the checkpoint contains that of rank 0.

`torch.save` stores the device of each tensor, so the files of several GPUs differ in a few bytes. Here, workers on CPUs
store `cuda:<rank>` as on a machine with GPUs.
"""
# arguments: local
# campaign: ray

import sys
import tempfile
from pathlib import Path

import torch

import drivetrain
from drivetrain import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, prepare_model

RUNTIME = sys.argv[1]
REPORTS = 3


def train_func() -> None:
    rank = drivetrain.get_context().get_world_rank()
    torch.serialization.location_tag = lambda storage: f"cuda:{rank}"
    model = prepare_model(torch.nn.Linear(4, 2))
    for step in range(REPORTS):
        with tempfile.TemporaryDirectory() as directory:
            torch.save(model.module.state_dict(), Path(directory, "model.pt"))
            drivetrain.report({"step": step}, Checkpoint.from_directory(directory))


def tags(run_config: RunConfig) -> list[tuple[str, bool]]:
    """Return, for each stored model, its path and whether it contains the device of rank 0."""
    scaling = ScalingConfig(num_workers=2, runtime=RUNTIME)
    result = TorchTrainer(train_func, scaling_config=scaling, run_config=run_config).fit()
    found = []
    for checkpoint, _ in result.best_checkpoints:
        root = Path(checkpoint.path)
        for file in sorted(root.rglob("model.pt")):
            found.append((str(file.relative_to(root)), b"cuda:0" in file.read_bytes()))
    return found


if __name__ == "__main__":
    default = tags(RunConfig(verbose=0))
    keeping = tags(RunConfig(verbose=0, checkpoint_config=CheckpointConfig(on_conflict="keep_all")))
    print(default, keeping)
    of_rank_0, of_rank_1 = ("model.pt", True), ("rank_1/model.pt", False)
    sys.exit(0 if (default, keeping) == ([of_rank_0] * REPORTS, [of_rank_0, of_rank_1] * REPORTS) else 1)
