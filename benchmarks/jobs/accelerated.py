"""The loop of the jobs that train under Accelerate."""

import time
from typing import Any

import torch
from accelerate import Accelerator
from ddp import BATCH, CLASSES, FEATURES, WARMUP_STEPS, make_model
from stamps import stamp
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, Any]) -> None:
    """Train the configured number of steps, and stamp the steps per second."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20 * BATCH, FEATURES, generator=generator)
    data = TensorDataset(features, torch.randint(CLASSES, (len(features),), generator=generator))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    step = -WARMUP_STEPS
    started = time.perf_counter()
    while step < config["steps"]:
        for inputs, labels in loader:
            if step == 0:
                started = time.perf_counter()
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(inputs), labels))
            optimizer.step()
            step += 1
    stamp(config, "trained", steps_per_second=step / (time.perf_counter() - started))
