"""``HorovodTrainer``: the trainer with the Horovod backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import DataParallelTrainer
from drivetrain.plugin.trainers import checked_config
from drivetrain_horovod._config import HorovodConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from drivetrain.plugin.trainers import CommonArguments, ConfigT, TrainFunction

__all__ = ["HorovodTrainer"]


class HorovodTrainer(DataParallelTrainer):
    """Run a Horovod train function on every worker. In it, ``hvd.init()`` connects to the other ranks.

    Args:
        train_loop_per_worker: the train function. It takes no argument, or the config.
        train_loop_config: the config to pass to the train function.
        horovod_config: settings of Horovod.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, how the run is monitored, and when it stops.
        datasets: see :class:`~drivetrain.DataParallelTrainer`.
        dataset_config: which datasets are split among the workers, and how.
        metadata: values returned by ``get_context().get_metadata()`` and by every checkpoint's ``get_metadata()``.
        resume_from_checkpoint: the checkpoint that ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument has the wrong type, or the function cannot be called as described.

    Example:
        >>> import drivetrain
        >>> def train_func():
        ...     import horovod.torch as hvd
        ...
        ...     hvd.init()
        ...     drivetrain.report({"workers": hvd.size()})
        >>> trainer = HorovodTrainer(
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
        horovod_config: HorovodConfig | None = None,
        **arguments: Unpack[CommonArguments],
    ) -> None:
        config = checked_config(horovod_config, HorovodConfig, "HorovodTrainer(horovod_config=...)")
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **arguments)
