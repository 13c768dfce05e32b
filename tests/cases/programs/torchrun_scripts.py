"""`drivetrain run script.py --num-workers N` runs scripts that were written for torchrun, without a change."""

import subprocess
import sys
from pathlib import Path

PLAIN = """
import os

assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()

import torch

torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.full((1, 1), rank + 1.0)).sum().backward()
gradient = model.module.weight.grad.item()
print("size", size, "gradient", gradient)
torch.distributed.destroy_process_group()
"""
FABRIC = """
import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = fabric.setup_module(torch.nn.Linear(1, 1, bias=False))
fabric.backward(model(torch.full((1, 1), fabric.global_rank + 1.0)).sum())
print("size", fabric.world_size, "gradient", next(model.parameters()).grad.item())
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
print("size", accelerator.num_processes, "gradient", next(model.parameters()).grad.item())
"""
SCRIPTS = {"plain.py": PLAIN, "with_fabric.py": FABRIC, "with_accelerate.py": ACCELERATE}

if __name__ == "__main__":
    problems = []
    for name, source in SCRIPTS.items():
        Path(name).write_text(source)
        command = [sys.executable, "-m", "drivetrain", "run", name, "--num-workers", "2", "--output-of", "all", "-q"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        for rank in range(2):  # the inputs of the ranks are 1 and 2, so the mean gradient is 1.5
            if f"[rank {rank}] size 2 gradient 1.5" not in done.stdout:
                problems.append(f"{name}, rank {rank}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        if done.returncode != 0:
            problems.append(f"{name}: exit code {done.returncode}")
    print("\n".join(problems) or "OK")
    sys.exit(bool(problems))
