"""``JaxTrainer``: the trainer with the JAX backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import DataParallelTrainer
from drivetrain.plugin.trainers import checked_config
from drivetrain_jax._config import JaxConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from drivetrain.plugin.trainers import CommonArguments, ConfigT, TrainFunction

__all__ = ["JaxTrainer"]


class JaxTrainer(DataParallelTrainer):
    """Run a JAX train function on every worker. In it, ``jax.devices()`` contains the devices of all workers.

    Args:
        train_loop_per_worker: the train function. It takes no argument, or the config.
        train_loop_config: the config to pass to the train function.
        jax_config: settings of JAX.
        **arguments: see :class:`~drivetrain.DataParallelTrainer`.

    Raises:
        ConfigurationError: an argument has the wrong type, or the function cannot be called as described.

    Example:
        >>> import drivetrain
        >>> def train_func():
        ...     import jax
        ...
        ...     drivetrain.report({"workers": jax.process_count()})
        >>> trainer = JaxTrainer(
        ...     train_func,
        ...     scaling_config=drivetrain.ScalingConfig(num_workers=2),
        ...     run_config=drivetrain.RunConfig(verbose=0),
        ... )
        >>> trainer.fit().metrics["workers"]
        2
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT],
        *,
        train_loop_config: ConfigT | None = None,
        jax_config: JaxConfig | None = None,
        **arguments: Unpack[CommonArguments],
    ) -> None:
        config = checked_config(jax_config, JaxConfig, "JaxTrainer(jax_config=...)")
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **arguments)
