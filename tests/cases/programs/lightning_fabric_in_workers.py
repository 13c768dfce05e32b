"""`Fabric()` trains on all workers together, in a train function and in a script for `drivetrain run`."""

# arguments: local
# campaign: inprocess; ray

import subprocess
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import RunConfig, ScalingConfig
from drivetrain_lightning import RayLightningEnvironment
from drivetrain_torch import TorchTrainer

SCRIPT = """
from lightning.fabric import Fabric

fabric = Fabric()
fabric.launch()
print("size", fabric.world_size, "sum", fabric.all_reduce(fabric.global_rank + 1.0, reduce_op="sum").item())
"""


class RunsItself(Fabric):
    """A `Fabric` in the form of a class."""

    def run(self):
        return self.world_size


def train():
    options = [{}, {"accelerator": "cpu"}, {"strategy": "ddp"}, {"plugins": [RayLightningEnvironment()]}]
    seen = []
    for each in options:
        fabric = Fabric(**each)
        fabric.launch()
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4))
        model = fabric.setup_module(torch.nn.Linear(1, 1, bias=False))
        fabric.backward(model(torch.full((1, 1), fabric.global_rank + 1.0)).sum())
        seen.append((fabric.world_size, len(loader), next(model.parameters()).grad.item()))
    seen.append(RunsItself().run())
    return seen


if __name__ == "__main__":
    runtime = sys.argv[1]
    workers = 0 if runtime == "inprocess" else 2
    scaling = ScalingConfig(num_workers=workers, runtime=runtime)
    seen = TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(verbose=0)).fit().return_value
    print(seen)
    wrong = seen != ([(2, 5, 1.5)] * 4 + [2] if workers else [(1, 10, 1.0)] * 4 + [1])
    if runtime == "local":
        Path("script.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "drivetrain", "run", "script.py", "--num-workers", "2", "--output-of", "all"]
        output = subprocess.run([*command, "-q"], capture_output=True, text=True, timeout=200, check=False).stdout
        print(output)
        wrong |= not all(f"[rank {rank}] size 2 sum 3.0" in output for rank in range(2))
    sys.exit(wrong)
