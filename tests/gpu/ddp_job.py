"""The same DistributedDataParallel steps under torchrun and under drivetrain, for ``checks/torchrun.py``.

``python -m torch.distributed.run ... -m tests.gpu.ddp_job torchrun --device D --workers N --result FILE``, or
``python -m tests.gpu.ddp_job drivetrain ...`` without a launcher.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARMUP = 20
SIZES = {
    # An encoder with 19 million parameters, limited by the speed of the GPU.
    "cuda": {"encoder": {"width": 512, "layers": 6, "batch": 64, "length": 128, "steps": 200}},
    "cpu": {"encoder": {"width": 32, "layers": 1, "batch": 4, "length": 16, "steps": 40}},
}
PERCEPTRON_STEPS = {"cuda": 1000, "cpu": 100}


def measure(device: torch.device, report: Callable[[dict[str, float]], None]) -> dict[str, float]:
    """Return the steps per second of two models, and the memory of the first one. Call ``report`` in every step."""
    size = SIZES[device.type]["encoder"]
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        size["width"], nhead=8, dim_feedforward=4 * size["width"], dropout=0.0, batch_first=True
    )
    encoder = torch.nn.TransformerEncoder(layer, size["layers"], enable_nested_tensor=False)
    # A small perceptron is limited by the launching of kernels, so it measures the overhead of a step on the host.
    perceptron = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    figures = {
        "encoder steps/s": steps_per_second(
            encoder, torch.rand(size["batch"], size["length"], size["width"]), size["steps"], device, report
        )
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        figures["peak allocated MiB"] = torch.cuda.max_memory_allocated(device) / 2**20
        figures["peak reserved MiB"] = torch.cuda.max_memory_reserved(device) / 2**20
        figures["in use on the GPU MiB"] = (total - free) / 2**20  # by all processes, including their CUDA contexts
    steps = PERCEPTRON_STEPS[device.type]
    figures["perceptron steps/s"] = steps_per_second(perceptron, torch.rand(32, 64), steps, device, report)
    return figures


def steps_per_second(
    model: torch.nn.Module,
    batch: torch.Tensor,
    steps: int,
    device: torch.device,
    report: Callable[[dict[str, float]], None],
) -> float:
    on_gpu = device.type == "cuda"
    model = DistributedDataParallel(model.to(device), device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = batch.to(device)
    started = 0.0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            if on_gpu:
                torch.cuda.synchronize(device)
            started = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        report({"step": float(step)})
    if on_gpu:
        torch.cuda.synchronize(device)
    return steps / (time.perf_counter() - started)


def train_func(config: dict[str, Any]) -> dict[str, float]:
    """Measure with drivetrain, with a report in every step."""
    import drivetrain
    from drivetrain_torch import get_device

    return measure(get_device(), drivetrain.report)


def run_drivetrain(options: argparse.Namespace) -> dict[str, float]:
    from tests.gpu.check import Run

    run = Run(device=options.device, gpus=options.workers, directory=options.result.parent)
    return run.fit(train_func, {}, workers=options.workers).return_value


def run_torchrun(options: argparse.Namespace) -> dict[str, float]:
    """Measure in a process of torchrun, without reports."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    figures = measure(device, lambda metrics: None)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return figures if rank == 0 else {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("drivetrain", "torchrun"))
    parser.add_argument("--device", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    if figures := {"drivetrain": run_drivetrain, "torchrun": run_torchrun}[options.side](options):
        options.result.write_text(json.dumps(figures))
