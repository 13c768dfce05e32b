"""JAX for drivetrain: connects the workers with ``jax.distributed``, and saves and restores the state of a training.

Importing this package does not import JAX. Each worker imports JAX before the train function runs.
"""

from drivetrain_jax._config import JaxConfig
from drivetrain_jax._dataset import prepare_dataset_shard
from drivetrain_jax._state import TrainState
from drivetrain_jax._trainer import JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer", "TrainState", "prepare_dataset_shard"]

__version__ = "0.1.0"
