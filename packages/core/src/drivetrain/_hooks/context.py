"""Frozen facts: about one worker, about what a worker's train function runs in, and about the run as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain._storage.layout import ARTIFACTS

if TYPE_CHECKING:
    from pathlib import Path

    from drivetrain._base.console import Console
    from drivetrain._storage.directory import Storage
    from drivetrain.config import CheckpointConfig, RunConfig, ScalingConfig

__all__ = ["Run", "TrainContext", "Trial", "WorkerInfo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The place of a run in a search for hyperparameters.

    Attributes:
        name: what the search calls it.
        id: a short id of it within the search, which stays the same when it is started again.
        experiment: the name of the search.
    """

    name: str
    id: str
    experiment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """Where one worker of the group is.

    Attributes:
        rank: its rank over all workers, 0 to world size - 1.
        local_rank: its rank among the workers of its node.
        node_rank: the rank of its node, 0 to number of nodes - 1.
        node_id: what the runtime calls its node.
        hostname: the node's host name.
        ip: the address at which the other workers reach it.
        pid: its process id on that node.
        accelerator_ids: the GPUs that are its own, as ``CUDA_VISIBLE_DEVICES`` names them.
    """

    rank: int
    local_rank: int
    node_rank: int
    node_id: str
    hostname: str
    ip: str
    pid: int
    accelerator_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainContext:
    """What the train function can know about the run it is part of; :func:`drivetrain.get_context` returns it.

    Attributes:
        worker: where this worker is.
        world_size: number of workers in the group.
        local_world_size: number of workers on this worker's node.
        run_name: the run's name.
        run_id: an id of the run that stays the same over attempts and resumes.
        storage: the run directory.
        checkpoint_config: which checkpoints the run keeps, and by which metric.
        trial_dir: the directory for files that the train function writes beside its checkpoints.
        attempt: 0 for the first start of the group, 1 after the first restart, and so on.
        metadata: what the trainer was made with.
        trial_resources: the resources that the whole run asked for.
        trial: what the run is in a search for hyperparameters; None outside one.
    """

    worker: WorkerInfo
    world_size: int
    local_world_size: int
    run_name: str
    run_id: str
    storage: Storage
    checkpoint_config: CheckpointConfig
    trial_dir: str = ""
    attempt: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trial_resources: Mapping[str, float] = field(default_factory=dict)
    trial: Trial | None = None

    def get_world_size(self) -> int:
        """Number of workers in the group."""
        return self.world_size

    def get_world_rank(self) -> int:
        """This worker's rank over all workers, from 0."""
        return self.worker.rank

    def get_local_rank(self) -> int:
        """This worker's rank among the workers of its node, from 0."""
        return self.worker.local_rank

    def get_local_world_size(self) -> int:
        """Number of workers on this worker's node."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """The rank of this worker's node, from 0."""
        return self.worker.node_rank

    def get_experiment_name(self) -> str:
        """The run's name; in a search for hyperparameters that of the search."""
        return self.trial.experiment if self.trial else self.run_name

    def get_trial_name(self) -> str:
        """The trial's name in a search for hyperparameters; otherwise the run's."""
        return self.trial.name if self.trial else self.run_name

    def get_trial_id(self) -> str:
        """The trial's id in a search for hyperparameters; otherwise the run's. It stays the same over all starts."""
        return self.trial.id if self.trial else self.run_id

    def get_trial_dir(self) -> str:
        """The directory for files that the train function writes beside its checkpoints."""
        return self.trial_dir

    def get_run_dir(self) -> str:
        """The run directory, as a path on :meth:`get_run_filesystem`; on local storage a directory of this machine."""
        return self.storage.root

    def get_run_filesystem(self) -> Any:
        """The filesystem of fsspec or pyarrow that the run directory is on."""
        return self.storage.filesystem.handle

    def get_trial_resources(self) -> dict[str, float]:
        """The resources that the whole run asked for, workers and trainer added up."""
        return dict(self.trial_resources)

    def get_metadata(self) -> dict[str, Any]:
        """The ``metadata`` that the trainer was made with."""
        return dict(self.metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a callback can know about the run.

    Attributes:
        name: the run's name, which is also its directory's.
        id: eight hexadecimal digits that stay the same over attempts and resumes.
        path: a local directory for what callbacks write: the run directory, or one that is copied to it.
        location: the run directory on its filesystem.
        storage: the run directory, wherever it is.
        scaling_config: as given to the trainer.
        run_config: as given to the trainer.
        train_loop_config: as given to the trainer.
        console: prints whole lines beside the progress line.
        trial: what the run is in a search for hyperparameters; None outside one.
    """

    name: str
    id: str
    path: Path
    location: str
    storage: Storage
    scaling_config: ScalingConfig
    run_config: RunConfig
    train_loop_config: Mapping[str, Any] | None
    console: Console
    trial: Trial | None = None

    @property
    def artifacts(self) -> Path:
        """The directory that workers get from ``get_trial_dir()``, if the run is stored on this machine."""
        return self.path / ARTIFACTS
