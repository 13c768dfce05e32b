"""The DDP job that loses a worker: it trains, one rank is killed, and the restarted function takes a step."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from ddp import WARMUP_STEPS, DistributedDataParallel, backward, make_batch, make_model
from stamps import stamp

STATE = "state.pt"
LOST_RANK = 1
SPARES_WAIT_S = 12


def kill(config: dict[str, Any]) -> None:
    """Kill this process, and before it its node, if the job must lose one."""
    if config.get("nodes"):
        raylet = psutil.Process().parent()
        assert raylet is not None
        assert raylet.name() == "raylet"
        raylet.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def recover(config: dict[str, Any], save: Callable[[dict[str, Any]], None], load: Callable[[], Path | None]) -> None:
    """Kill this process on one rank, the first time; the second time, take one step from the checkpoint."""
    killed = Path(config["stamps"] + ".killed")
    restarted = killed.exists()
    stamp(config, "train_function", restarted=restarted)
    rank = dist.get_rank()
    model = make_model()
    path = load()
    assert (path is not None) == restarted, "only the restarted function must have the checkpoint"
    if path is not None:
        model.load_state_dict(torch.load(path, weights_only=True))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    batch = make_batch(rank)
    for step in range(1 if restarted else WARMUP_STEPS):
        optimizer.zero_grad()
        backward(parallel, batch)
        optimizer.step()
        if step == 0 and not restarted:
            save(model.state_dict())
    if restarted:
        stamp(config, "stepped")
        return
    if rank == LOST_RANK:
        time.sleep(SPARES_WAIT_S if config.get("spares") else 0)  # until the spares have started
        killed.touch()
        stamp(config, "killed")
        kill(config)
    backward(parallel, batch)  # never ends, as its peer was lost
    raise AssertionError("a step succeeded without the other rank")
