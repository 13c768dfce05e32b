"""``TorchTrainer``: the trainer with the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import Checkpoint, ConfigurationError, DataConfig, DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_torch._config import TorchConfig

__all__ = ["TorchTrainer"]


class TorchTrainer(DataParallelTrainer):
    """Runs a PyTorch train function on every worker, inside one process group.

    Args:
        train_loop_per_worker: the train function; it takes no argument, or the config.
        train_loop_config: what to pass to it.
        torch_config: how the process group is set up.
        scaling_config: how many workers, with what.
        run_config: where results are kept, how the run is watched, and when it ends.
        datasets: see :class:`~drivetrain.DataParallelTrainer`.
        dataset_config: which of them are split, and how.
        metadata: what ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` give back.
        resume_from_checkpoint: what ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the function cannot be called as described.

    Example:
        >>> import drivetrain, torch
        >>> def train_func():
        ...     ones = torch.ones(1)
        ...     torch.distributed.all_reduce(ones)
        ...     drivetrain.report({"workers": ones})
        >>> trainer = TorchTrainer(
        ...     train_func,
        ...     scaling_config=drivetrain.ScalingConfig(num_workers=2),
        ...     run_config=drivetrain.RunConfig(verbose=0),
        ... )
        >>> trainer.fit().metrics["workers"]
        2.0
    """

    _backend_argument = "torch_config"

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        config: object = TorchConfig() if torch_config is None else torch_config
        if not isinstance(config, TorchConfig):
            raise ConfigurationError(f"TorchTrainer(torch_config=...) wants a TorchConfig, found {config!r}")
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
