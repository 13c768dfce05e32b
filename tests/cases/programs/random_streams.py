"""Each rank, run and attempt draws its own random numbers, also in loader processes; a seed in the function decides.

The process from which local workers are forked has imported PyTorch and NumPy, so without a new seed all workers would
draw the same numbers: the same noise, dropout masks and augmentation on all ranks, and the same values in every run.
"""

# arguments: local
# campaign: ray

import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import drivetrain
import drivetrain_interactive
from drivetrain_torch import TorchTrainer

WORKERS = 3
NAMES = ("random", "numpy", "torch", "dropout", "loader")


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.cat([torch.rand(1), torch.tensor([random.random(), np.random.rand()])])


def draw():
    loader = torch.utils.data.DataLoader(Noise(), batch_size=1, num_workers=2)
    return {
        "random": random.random(),
        "numpy": float(np.random.rand()),
        "torch": torch.rand(2).tolist(),
        "dropout": torch.nn.functional.dropout(torch.ones(64), 0.5).tolist(),
        "loader": [batch.tolist() for batch in loader],
    }


def seed_everything():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def train_func(config):
    context = drivetrain.get_context()
    if config.get("seeded"):
        seed_everything()
    file = Path(config["directory"], f"attempt_{context.attempt}_rank_{context.get_world_rank()}.json")
    file.write_text(json.dumps(draw()))
    torch.distributed.barrier()
    if config.get("dies") and context.attempt == 0 and context.get_world_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def read(directory):
    return [json.loads(file.read_text()) for file in Path(directory).iterdir()]


def fit(**config):
    """Return what all ranks have drawn in all attempts of a run."""
    with tempfile.TemporaryDirectory() as directory:
        TorchTrainer(
            train_func,
            train_loop_config={**config, "directory": directory},
            scaling_config=drivetrain.ScalingConfig(num_workers=WORKERS, runtime=RUNTIME),
            run_config=drivetrain.RunConfig(verbose=0, failure_config=drivetrain.FailureConfig(max_failures=1)),
        ).fit()
        return read(directory)


def run_twice_in_the_same_processes():
    """Return what all ranks have drawn in two runs of an interactive trainer; the first one sets the seed."""
    drawn = []
    with drivetrain_interactive.Trainer(
        "torch", num_workers=WORKERS, runtime=RUNTIME, run_config=drivetrain.RunConfig(verbose=0)
    ) as trainer:
        for seeded in (True, False):
            with tempfile.TemporaryDirectory() as directory:
                trainer.run(train_func, config={"directory": directory, "seeded": seeded})
                drawn.append(read(directory))
    return drawn


def count_different(drawn, name):
    return len({json.dumps(each[name]) for each in drawn})


RUNTIME = sys.argv[1] if len(sys.argv) > 1 else "local"

if __name__ == "__main__":
    seed_everything()  # the driver's seed does not reach the workers
    different = fit(dies=True) + fit()
    seeded = fit(seeded=True)
    first, second = run_twice_in_the_same_processes()
    problems = []
    for name in NAMES:
        expected = {"different": (different, 3 * WORKERS), "seeded": (seeded, 1), "reused": (second, WORKERS)}
        expected["reused after a seed"] = ([*second, first[0]], WORKERS + 1)
        for case, (drawn, count) in expected.items():
            if (found := count_different(drawn, name)) != count:
                problems.append(f"{name}, {case}: expected {count} different values, got {found}")
    print("\n".join(problems) or "OK")
    sys.exit(bool(problems))
