"""``TorchTrainer``: the trainer with the torch backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import DataParallelTrainer
from drivetrain_torch._config import TorchConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from typing_extensions import Unpack

    from drivetrain.plugin import TrainerArguments

__all__ = ["TorchTrainer"]


class TorchTrainer(DataParallelTrainer, config=TorchConfig):
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

    if TYPE_CHECKING:  # the constructor is that of the base; this declares the name and type of its configuration

        def __init__(
            self,
            train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
            *,
            torch_config: TorchConfig | None = None,
            **arguments: Unpack[TrainerArguments],
        ) -> None: ...
