"""Names for backends and plugins of frameworks."""

from drivetrain._base.lazy import publish
from drivetrain._hooks.backend import WorkerGroup, WrappedBackend
from drivetrain._hooks.context import AttemptInfo
from drivetrain._hooks.dataset import is_instance_of
from drivetrain._hooks.finding import Finding, run_python
from drivetrain._hooks.helpers import (
    ProcessValue,
    node_accelerators,
    port_to_bind,
    reserve_port,
    temporary_environment,
    worker_threads,
)
from drivetrain._runtimes.reservations import gpu_holders
from drivetrain._runtimes.resources import visible_gpus

__all__ = [
    "AttemptInfo",
    "Finding",
    "ProcessValue",
    "WorkerGroup",
    "WrappedBackend",
    "gpu_holders",
    "is_instance_of",
    "node_accelerators",
    "port_to_bind",
    "reserve_port",
    "run_python",
    "temporary_environment",
    "visible_gpus",
    "worker_threads",
]

publish(__name__)
