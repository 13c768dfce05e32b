"""Creates the workers' tasks. A task contains everything that a rank needs to run the train function once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain._base.failure import one_line
from drivetrain._base.mesh import DataPosition
from drivetrain._base.pickling import dumps
from drivetrain._driver.progress import HangLimits
from drivetrain._driver.services import RunServices
from drivetrain._hooks.backend import Backend
from drivetrain._hooks.context import TrainContext, WorkerInfo
from drivetrain._runtimes.base import Group
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._wire.events import ReportNumber
from drivetrain._wire.task import PackedFunction, SessionOptions, TrainTask
from drivetrain.config import ScalingConfig
from drivetrain.errors import BackendError, PluginBrokenError

__all__ = ["TaskFactory", "require_pickling", "require_pickling_of_task", "scaling_for"]


class TaskFactory:
    """Creates the tasks of one run.

    Args:
        services: the services of the run.
        function: see :attr:`~drivetrain._wire.task.TrainTask.function`.
        split: splits the datasets among the given workers. Its second argument is the checkpoint to resume from, or
            None.
        data_position: returns the position of a rank in the datasets that are split, given the number of workers; None
            if the user's own code splits them.
        metadata: the trainer's metadata, which ``get_context().get_metadata()`` returns.
        driver_count: the number of drivers that have worked on the run, including this driver.
        all_values: True if the return values of all ranks are needed, not only that of rank 0.
    """

    def __init__(
        self,
        services: RunServices,
        *,
        function: PackedFunction,
        split: Callable[[Sequence[WorkerInfo], Checkpoint | None], Sequence[Mapping[str, Any]]],
        data_position: Callable[[int, int], DataPosition] | None = None,
        metadata: Mapping[str, Any],
        driver_count: int = 1,
        all_values: bool = False,
    ) -> None:
        self._services = services
        self._function = function
        self._split = split
        self._data_position = data_position
        self._metadata = metadata
        self.driver_count = driver_count
        self._all_values = all_values
        self._shards: Sequence[Mapping[str, Any]] = ()
        self._on_node: Counter[str] = Counter()

    def split_datasets(self, workers: Sequence[WorkerInfo], checkpoint: Checkpoint | None) -> None:
        """Split the datasets among the workers of an attempt.

        This object keeps a reference to the shards while the workers use them. Without a reference in this process, Ray
        would terminate the actor that splits the dataset.
        """
        self._shards = self._split(workers, checkpoint)
        self._on_node = Counter(worker.node_id for worker in workers)

    def make(
        self,
        group: Group,
        rank: int,
        rendezvous: Mapping[str, str],
        *,
        attempt: int,
        checkpoint: Checkpoint | None,
        last_report: ReportNumber,
    ) -> TrainTask:
        """Return the task of one rank."""
        run, worker, world_size = self._services.run, group.workers[rank], len(group.workers)
        config = run.run_config
        return TrainTask(
            function=self._function,
            backend=self._services.backend,
            rendezvous=rendezvous,
            context=TrainContext(
                worker=worker,
                world_size=world_size,
                local_world_size=self._on_node[worker.node_id],
                run_name=run.name,
                run_id=run.id,
                trial=run.trial,
                storage=run.storage,
                attempt=attempt,
                metadata=self._metadata,
                trial_resources=scaling_for(run.scaling_config, world_size).total_resources,
                checkpoint_config=config.checkpoint_config,
            ),
            checkpoint=checkpoint,
            last_report=last_report,
            options=SessionOptions(
                sync=config.sync_config,
                driver_count=self.driver_count,
                chdir=config.chdir_to_trial_dir,
                progress_interval_s=HangLimits.of(config.hang_timeout_s).interval_s,
            ),
            datasets=self._shards[rank],
            data_position=None if self._data_position is None else self._data_position(rank, world_size),
            needs_value=self._all_values or rank == 0,
        )


def require_pickling(backend: Backend, reduce: Callable[[Any], Any]) -> None:
    """Check that a backend can be sent to the workers.

    Args:
        backend: the backend.
        reduce: see :meth:`drivetrain.plugin.Runtime.reduce`.

    Raises:
        BackendError: it cannot be pickled.
    """
    try:
        dumps(backend, reduce)
    except Exception as error:  # a plugin's object may raise any exception
        raise BackendError(
            f"[DT-607] backend {backend.name!r}: expected a backend that can be pickled, got "
            f"{type(backend).__qualname__} ({one_line(error)}). Create such objects in session()"
        ) from error


def require_pickling_of_task(task: TrainTask, reduce: Callable[[Any], Any]) -> None:
    """Check that the objects of plugins in a task can be sent to a worker.

    Raises:
        BackendError: the backend cannot be pickled.
        PluginBrokenError: a shard of a dataset cannot be pickled.
    """
    require_pickling(task.backend, reduce)
    for name, shard in task.datasets.items():
        try:
            dumps(shard, reduce)
        except Exception as error:  # a plugin's object may raise any exception
            raise PluginBrokenError(
                f"[DT-602] dataset {name!r}: expected shards that can be pickled, got {type(shard).__qualname__} "
                f"({one_line(error)}). Open files in iter_batches()"
            ) from error


def scaling_for(scaling: ScalingConfig, size: int) -> ScalingConfig:
    """Return the configuration with a fixed number of workers. Only that of an elastic run has to be changed."""
    return scaling if scaling.num_workers == scaling.max_workers else replace(scaling, num_workers=size)
