"""Immutable information about a worker, the context of a train function, and the run."""

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

__all__ = ["AttemptInfo", "Run", "TrainContext", "Trial", "WorkerInfo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Identifies a run within a hyperparameter search.

    Attributes:
        name: the name of the trial.
        id: a short id within the search, which stays the same when the trial is restarted.
        experiment: the name of the search.
    """

    name: str
    id: str
    experiment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """The ranks, node and devices of one worker.

    Attributes:
        rank: its world rank, from 0 to world size - 1.
        local_rank: its rank among the workers of its node.
        node_rank: the rank of its node, from 0 to number of nodes - 1.
        node_id: the id of its node, in the form that the runtime uses.
        hostname: the node's host name.
        ip: the IP address at which other workers reach this worker.
        pid: its process id on that node.
        accelerator_ids: the ids of its GPUs, as in ``CUDA_VISIBLE_DEVICES``.
        other_accelerators: the ids of its accelerators other than GPUs, by resource name, such as ``{"TPU": ("0",)}``,
            if the runtime assigns them.
        accelerator_names: the models of its GPUs, such as ``("NVIDIA H100 80GB HBM3",)``; empty if they are unknown.
        versions: the versions of Python, drivetrain, the frameworks and the GPU driver on its node, by name; empty if
            its process was forked on the driver's machine.
    """

    rank: int
    local_rank: int
    node_rank: int
    node_id: str
    hostname: str
    ip: str
    pid: int
    accelerator_ids: tuple[str, ...] = ()
    other_accelerators: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    accelerator_names: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptInfo:
    """Information about an attempt for a backend, as :attr:`drivetrain.plugin.backends.WorkerGroup.attempt`.

    Attributes:
        number: the number of the attempt: 0 for the first, 1 for the first retry, and so on.
        run_name: the run's name.
        run_id: the run's id, which stays the same over attempts and resumes.
        start_timeout_s: seconds within which every worker must start running the train function.
    """

    number: int
    run_name: str
    run_id: str
    start_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainContext:
    """Information for the train function about its worker and run; :func:`drivetrain.get_context` returns it.

    Attributes:
        worker: the ranks, node and devices of this worker.
        world_size: number of workers in the group.
        local_world_size: number of workers on this worker's node.
        run_name: the run's name.
        run_id: the run's id, which stays the same over attempts and resumes.
        storage: the run directory.
        checkpoint_config: the checkpoint settings of the run.
        trial_dir: the directory for files that the train function writes, other than checkpoints.
        attempt: the number of the attempt: 0 for the first, 1 for the first retry, and so on.
        metadata: the trainer's ``metadata`` argument.
        trial_resources: the resources of the whole run (workers and trainer together), by name.
        trial: identifies the run within a hyperparameter search; None outside a search.
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
        """Return the number of workers in the group."""
        return self.world_size

    def get_world_rank(self) -> int:
        """Return this worker's rank among all workers, from 0."""
        return self.worker.rank

    def get_local_rank(self) -> int:
        """Return this worker's rank among the workers of its node, from 0."""
        return self.worker.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this worker's node."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """Return the rank of this worker's node, from 0."""
        return self.worker.node_rank

    def get_experiment_name(self) -> str:
        """Return the name of the hyperparameter search, or of the run outside a search."""
        return self.trial.experiment if self.trial else self.run_name

    def get_trial_name(self) -> str:
        """Return the name of the trial in a hyperparameter search, or of the run outside a search."""
        return self.trial.name if self.trial else self.run_name

    def get_trial_id(self) -> str:
        """Return the id of the trial, or of the run outside a search. The id does not change on retries and resumes."""
        return self.trial.id if self.trial else self.run_id

    def get_trial_dir(self) -> str:
        """Return the directory for files that the train function writes, other than checkpoints."""
        return self.trial_dir

    def get_run_dir(self) -> str:
        """Return the path of the run directory on :meth:`get_run_filesystem`. On local storage, it is a local path."""
        return self.storage.root

    def get_run_filesystem(self) -> Any:
        """Return the fsspec or pyarrow filesystem that contains the run directory."""
        return self.storage.filesystem.handle

    def get_trial_resources(self) -> dict[str, float]:
        """Return the resources of the whole run (workers and trainer together), by name."""
        return dict(self.trial_resources)

    def get_metadata(self) -> dict[str, Any]:
        """Return the ``metadata`` that was passed to the trainer."""
        return dict(self.metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Information about the run, as passed to callbacks.

    Attributes:
        name: the name of the run and of its directory.
        id: the run's id: eight hexadecimal digits that stay the same over attempts and resumes.
        path: the local directory to which callbacks write files. On local storage, it is the run directory; otherwise,
            its files are uploaded to the run directory.
        location: the path of the run directory on its filesystem.
        storage: an object to access the run directory, on local or remote storage.
        scaling_config: the trainer's ``scaling_config``.
        run_config: the trainer's ``run_config``.
        train_loop_config: the trainer's ``train_loop_config``; if it is a dataclass, a mapping of its fields.
        console: prints whole lines without disturbing the progress line.
        trial: identifies the run within a hyperparameter search; None outside a search.
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
        """The ``artifacts`` directory in :attr:`path`.

        If the run is stored on this machine, ``get_trial_dir()`` returns the same directory on workers; otherwise,
        workers use another one.
        """
        return self.path / ARTIFACTS
