"""Recovery from the loss of a worker that was using the GPU."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import Checkpoint
from drivetrain_torch import get_device
from tests.gpu.check import Figures, Run, check, equal

STEPS, KILLED = 8, 5
BLOCK = 1 << 30  # bytes


def train_and_be_killed() -> dict[str, Any]:
    import torch

    device, attempt = get_device(), drivetrain.get_context().attempt
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    block = torch.zeros(BLOCK if device.type == "cuda" else 8, dtype=torch.uint8, device=device)
    value, first = torch.zeros(4, device=device), 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), map_location=device)
        value, first = state["value"], state["step"] + 1
    for step in range(first, STEPS):
        value += step
        torch.distributed.all_reduce(value)
        with tempfile.TemporaryDirectory() as directory:
            torch.save({"value": value, "step": step}, Path(directory, "state.pt"))
            drivetrain.report({"step": step, "free": free}, Checkpoint.from_directory(directory))
        if (attempt, step) == (0, KILLED):
            os.kill(os.getpid(), signal.SIGKILL)
    return {"first": first, "value": value.tolist(), "attempt": attempt, "free": free, "block": block.numel()}


@check(alone=True)
def killed_worker(run: Run) -> Figures:
    """After SIGKILL of a worker, the retry resumes from the last checkpoint, and the GPU memory is free again"""
    result = run.fit(train_and_be_killed, max_failures=1)
    got = result.return_value
    equal("attempt", got["attempt"], 1)
    equal("first step of the retry follows a checkpoint", got["first"] in (KILLED, KILLED + 1), True)
    equal("value", got["value"], [float(sum(range(STEPS)))] * 4)
    if run.device == "cpu":
        return {"first step of the retry": got["first"]}
    before = run.fit(free_memory).return_value
    lost = before - got["free"]
    assert lost < BLOCK // 2, f"free memory in the retry: expected no less than before, got {lost >> 20} MiB less"
    return {"first step of the retry": got["first"], "MiB lost": lost >> 20}


def free_memory() -> int:
    """Return the free memory of the GPU in a run without a failure."""
    import torch

    return torch.cuda.mem_get_info()[0]
