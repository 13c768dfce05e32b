"""TensorFlow for drivetrain: ``TF_CONFIG`` on every worker, and what makes its data fit for several workers.

Importing this package does not import TensorFlow: a worker does, once it needs it.
"""

from drivetrain_tf._config import TensorflowConfig
from drivetrain_tf._dataset import prepare_dataset_shard
from drivetrain_tf._trainer import TensorflowTrainer

__all__ = ["TensorflowConfig", "TensorflowTrainer", "prepare_dataset_shard"]
