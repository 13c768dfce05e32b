"""``HorovodTrainer``: the trainer with the Horovod backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import DataParallelTrainer
from drivetrain_horovod._config import HorovodConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from typing_extensions import Unpack

    from drivetrain.plugin import TrainerArguments

__all__ = ["HorovodTrainer"]


class HorovodTrainer(DataParallelTrainer, config=HorovodConfig):
    """Runs a Horovod train function on every worker; in it, ``hvd.init()`` finds the other ranks.

    Args:
        train_loop_per_worker: the train function; it takes no argument, or the config.
        train_loop_config: what to pass to it.
        horovod_config: how Horovod is set up.
        scaling_config: how many workers, with what.
        run_config: where results are kept, how the run is watched, and when it ends.
        datasets: see :class:`~drivetrain.DataParallelTrainer`.
        dataset_config: which of them are split, and how.
        metadata: what ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` give back.
        resume_from_checkpoint: what ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the function cannot be called as described.

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

    if TYPE_CHECKING:  # the constructor is that of the base; this declares the name and type of its configuration

        def __init__(
            self,
            train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
            *,
            horovod_config: HorovodConfig | None = None,
            **arguments: Unpack[TrainerArguments],
        ) -> None: ...
