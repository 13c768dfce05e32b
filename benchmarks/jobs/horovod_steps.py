"""The loop of the jobs that train under Horovod."""

import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from ddp import WARMUP_STEPS, backward, make_batch, make_model
from stamps import stamp


def train(config: dict[str, Any], report: Callable[[dict[str, Any]], None] = lambda metrics: None) -> None:
    """Train the configured number of steps, report each, and stamp the start and the steps per second."""
    hvd.init()
    assert hvd.size() == 2
    stamp(config, "initialized")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    batch = make_batch(hvd.rank())
    started = time.perf_counter()
    for step in range(-WARMUP_STEPS, config["steps"]):
        if step == 0:
            started = time.perf_counter()
        optimizer.zero_grad()
        loss = backward(model, batch)
        optimizer.step()
        report({"loss": loss.item(), "step": step})
    stamp(config, "trained", steps_per_second=config["steps"] / (time.perf_counter() - started))
