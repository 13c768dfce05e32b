"""JAX for drivetrain: connects the workers with ``jax.distributed``, and creates global arrays from dataset shards.

Importing this package does not import JAX. Each worker imports JAX before the train function runs.
"""

from drivetrain_jax._config import JaxConfig
from drivetrain_jax._dataset import prepare_dataset_shard
from drivetrain_jax._trainer import JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer", "prepare_dataset_shard"]
