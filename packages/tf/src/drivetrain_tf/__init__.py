"""TensorFlow for drivetrain: sets ``TF_CONFIG`` on every worker, and prepares datasets for several workers.

Importing this package does not import TensorFlow. Each worker imports TensorFlow on first use.
"""

from drivetrain_tf._config import TensorflowConfig
from drivetrain_tf._dataset import prepare_dataset_shard
from drivetrain_tf._trainer import TensorflowTrainer

__all__ = ["TensorflowConfig", "TensorflowTrainer", "prepare_dataset_shard"]
