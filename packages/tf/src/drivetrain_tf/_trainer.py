"""``TensorflowTrainer``: the trainer with the tensorflow backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import DataParallelTrainer
from drivetrain_tf._config import TensorflowConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from typing_extensions import Unpack

    from drivetrain.plugin import TrainerArguments

__all__ = ["TensorflowTrainer"]


class TensorflowTrainer(DataParallelTrainer, config=TensorflowConfig):
    """Runs a TensorFlow train function on every worker, each of which knows the others.

    ``tf.distribute.MultiWorkerMirroredStrategy()``, made in the train function, spans all workers; with one worker, all
    of its GPUs.

    Args:
        train_loop_per_worker: the train function; it takes no argument, or the config.
        train_loop_config: what to pass to it.
        tensorflow_config: how TensorFlow is set up.
        scaling_config: how many workers, with what.
        run_config: where results are kept, how the run is watched, and when it ends.
        datasets: see :class:`~drivetrain.DataParallelTrainer`.
        dataset_config: which of them are split, and how.
        metadata: what ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` give back.
        resume_from_checkpoint: what ``get_checkpoint()`` returns at the start of a new run.

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

    if TYPE_CHECKING:  # the constructor is that of the base; this declares the name and type of its configuration

        def __init__(
            self,
            train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
            *,
            tensorflow_config: TensorflowConfig | None = None,
            **arguments: Unpack[TrainerArguments],
        ) -> None: ...
