"""TensorFlow for drivetrain: sets ``TF_CONFIG`` on every worker, prepares datasets, and saves the state of a training.

Importing this package does not import TensorFlow. Each worker imports TensorFlow on first use.
"""

from drivetrain_tf._config import TensorflowConfig
from drivetrain_tf._dataset import prepare_dataset_shard
from drivetrain_tf._state import TrainState
from drivetrain_tf._trainer import TensorflowTrainer

__all__ = ["TensorflowConfig", "TensorflowTrainer", "TrainState", "prepare_dataset_shard"]

__version__ = "0.1.0"
