"""The loop of the jobs that train under Lightning Fabric."""

import time
from typing import Any

import torch
from ddp import WARMUP_STEPS, make_batch, make_model
from lightning.fabric import Fabric
from stamps import stamp
from torch.nn.functional import cross_entropy


def train(fabric: Fabric, config: dict[str, Any]) -> None:
    """Train the configured number of steps, and stamp the steps per second."""
    assert fabric.world_size == 2
    network = make_model()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.01))
    features, labels = make_batch(fabric.global_rank)
    for step in range(-WARMUP_STEPS, config["steps"]):
        if step == 0:
            started = time.perf_counter()
        optimizer.zero_grad()
        fabric.backward(cross_entropy(model(features), labels))
        optimizer.step()
    stamp(config, "trained", steps_per_second=config["steps"] / (time.perf_counter() - started))
