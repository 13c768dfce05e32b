"""The conformance kits for the JAX backend and its trainer."""

from typing import Any

import drivetrain
from drivetrain_jax import JaxConfig, JaxTrainer
from drivetrain_testing import BackendConformance, TrainerConformance


def all_sum(value: float) -> float:
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    return float(multihost_utils.process_allgather(jnp.float32(value)).sum())


class TestJax(BackendConformance):
    config = JaxConfig()
    framework = "jax"
    all_sum = staticmethod(all_sum)


def train(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["loss"]})


class TestJaxTrainer(TrainerConformance):
    trainer = JaxTrainer
    name = "jax"

    def arguments(self) -> dict[str, Any]:
        config = JaxConfig(platform="cpu")
        return {"train_loop_per_worker": train, "train_loop_config": {"loss": 0.5}, "jax_config": config}
