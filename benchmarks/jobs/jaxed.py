"""The loop of the jobs that train with JAX: a small perceptron, data parallel over the devices of all processes."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from stamps import stamp

BATCH, FEATURES, WIDTH, CLASSES = 256, 64, 512, 10  # the batch of one worker
WARMUP_STEPS = 200  # longer than the background work of either side after a start


def loss_of(weights, features, labels):
    hidden = jax.nn.relu(features @ weights[0])
    hidden = jax.nn.relu(hidden @ weights[1])
    return -jnp.take_along_axis(jax.nn.log_softmax(hidden @ weights[2]), labels[:, None], axis=1).mean()


@partial(jax.jit, donate_argnums=0)
def train_step(weights, features, labels):
    loss, gradients = jax.value_and_grad(loss_of)(weights, features, labels)
    return [weight - 0.01 * gradient for weight, gradient in zip(weights, gradients, strict=True)], loss


def train(config: dict[str, Any], report: Callable[[dict[str, Any]], None] = lambda metrics: None) -> None:
    """Train the configured number of steps, report each, and stamp the steps per second."""
    assert jax.process_count() == 2
    mesh = Mesh(np.array(jax.devices()), ("workers",))
    split, copied = NamedSharding(mesh, PartitionSpec("workers")), NamedSharding(mesh, PartitionSpec())
    generator = np.random.default_rng(0)
    shapes = ((FEATURES, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES))
    arrays = [generator.normal(0, 0.05, shape).astype(np.float32) for shape in shapes]
    weights = [jax.make_array_from_process_local_data(copied, array) for array in arrays]
    rows = generator.normal(size=(BATCH, FEATURES)).astype(np.float32)
    features = jax.make_array_from_process_local_data(split, rows)
    labels = jax.make_array_from_process_local_data(split, generator.integers(0, CLASSES, BATCH))
    for number in range(-WARMUP_STEPS, config["steps"]):
        if number == 0:
            started = time.perf_counter()
        weights, loss = train_step(weights, features, labels)
        report({"loss": float(loss), "step": number})
    stamp(config, "trained", steps_per_second=config["steps"] / (time.perf_counter() - started))
