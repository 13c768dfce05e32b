"""``TensorflowTrainer``: the trainer with the TensorFlow backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import DataParallelTrainer
from drivetrain.plugin.trainers import checked_config
from drivetrain_tf._config import TensorflowConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from drivetrain.plugin.trainers import CommonArguments, ConfigT, TrainFunction

__all__ = ["TensorflowTrainer"]


class TensorflowTrainer(DataParallelTrainer):
    """Runs a TensorFlow train function on every worker, with ``TF_CONFIG`` set to the addresses of all workers.

    ``tf.distribute.MultiWorkerMirroredStrategy()``, created in the train function, spans all workers; with one worker,
    it spans all GPUs of the worker.

    Args:
        train_loop_per_worker: the train function. It takes no argument, or the config.
        train_loop_config: the config to pass to the train function.
        tensorflow_config: the configuration of TensorFlow.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, which callbacks run, and when the run stops.
        datasets: see :class:`~drivetrain.DataParallelTrainer`.
        dataset_config: which datasets are split among the workers, and how.
        metadata: the value that ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` return.
        resume_from_checkpoint: the checkpoint that ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument is of the wrong type, the function cannot be called as described, or
            ``TF_CONFIG`` is set.

    Example:
        >>> import drivetrain
        >>> def train_func():
        ...     import tensorflow as tf
        ...     strategy = tf.distribute.MultiWorkerMirroredStrategy()
        ...     drivetrain.report({"replicas": strategy.num_replicas_in_sync})
        >>> trainer = TensorflowTrainer(
        ...     train_func,
        ...     scaling_config=drivetrain.ScalingConfig(num_workers=2),
        ...     run_config=drivetrain.RunConfig(verbose=0, worker_output="none"),
        ... )
        >>> trainer.fit().metrics["replicas"]
        2
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT],
        *,
        train_loop_config: ConfigT | None = None,
        tensorflow_config: TensorflowConfig | None = None,
        **arguments: Unpack[CommonArguments],
    ) -> None:
        config = checked_config(tensorflow_config, TensorflowConfig, "TensorflowTrainer(tensorflow_config=...)")
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **arguments)
