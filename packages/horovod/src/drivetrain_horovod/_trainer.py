"""``HorovodTrainer``: the trainer with the Horovod backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import Checkpoint, ConfigurationError, DataConfig, DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_horovod._config import HorovodConfig

__all__ = ["HorovodTrainer"]


class HorovodTrainer(DataParallelTrainer):
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

    _backend_argument = "horovod_config"

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        horovod_config: HorovodConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        config: object = HorovodConfig() if horovod_config is None else horovod_config
        if not isinstance(config, HorovodConfig):
            raise ConfigurationError(f"HorovodTrainer(horovod_config=...) wants a HorovodConfig, found {config!r}")
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )
