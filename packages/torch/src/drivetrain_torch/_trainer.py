"""``TorchTrainer``: the trainer with the torch backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import DataParallelTrainer
from drivetrain.plugin.trainers import checked_config
from drivetrain_torch._config import TorchConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from drivetrain.plugin.trainers import CommonArguments, ConfigT, TrainFunction

__all__ = ["TorchTrainer"]


class TorchTrainer(DataParallelTrainer):
    """Run a PyTorch train function on every worker, inside one process group.

    Args:
        train_loop_per_worker: the train function. It takes no argument, or the config.
        train_loop_config: the config to pass to the train function.
        torch_config: settings of the process group.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, how the run is monitored, and when it stops.
        datasets: see :class:`~drivetrain.DataParallelTrainer`.
        dataset_config: which datasets are split among the workers, and how.
        metadata: values returned by ``get_context().get_metadata()`` and by every checkpoint's ``get_metadata()``.
        resume_from_checkpoint: the checkpoint that ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument has the wrong type, or the function cannot be called as described.

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

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT],
        *,
        train_loop_config: ConfigT | None = None,
        torch_config: TorchConfig | None = None,
        **arguments: Unpack[CommonArguments],
    ) -> None:
        config = checked_config(torch_config, TorchConfig, "TorchTrainer(torch_config=...)")
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config, backend_config=config, **arguments)
