"""The public API for plugin authors.

A plugin is an entry point in one of these groups:

========================= ====================================================================
group                     the plugin provides
========================= ====================================================================
``drivetrain.backends``   a :class:`drivetrain.BackendConfig` class, which sets up a framework
``drivetrain.callbacks``  a :class:`drivetrain.Callback` class, which watches a run
``drivetrain.commands``   a function that adds a command to ``drivetrain``, with :func:`add_command`
``drivetrain.datasets``   a :class:`DatasetProvider` class, which splits datasets of one kind
``drivetrain.frameworks`` under the name of a framework's root module, a :class:`Framework` class
``drivetrain.policies``   a :class:`drivetrain.FailurePolicy` class, or a function
``drivetrain.prepare``    under the name of a framework's root module, a function for :func:`drivetrain.prepare`
``drivetrain.runtimes``   a :class:`Runtime` class, which starts worker groups
``drivetrain.strategies`` a :class:`drivetrain_torch.ParallelStrategy` class, which wraps a PyTorch model
``drivetrain.trainables`` a function that adapts a trainer so that another system can run it
``drivetrain.trainers``   a trainer class, which :func:`drivetrain.restore` finds by its name
========================= ====================================================================

An installed plugin runs no code until it is selected by name, with three exceptions: drivetrain asks every dataset
provider whether it accepts a dataset, every runtime whether the environment selects it, and the plugin of every
framework that a process has imported. A plugin imports this
module, ``drivetrain`` and, in its tests, ``drivetrain_testing``; everything else in the package is internal. The
classes that plugins derive from are all here; those that users need too are the same objects as in ``drivetrain``.
"""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain._base.console import Console
    from drivetrain._base.failure import Failure
    from drivetrain._base.metrics import find_metric, flatten
    from drivetrain._base.outcome import RunOutcome, outcome_of
    from drivetrain._base.pickling import dumps
    from drivetrain._base.redact import redact
    from drivetrain._base.wakeup import Wakeup
    from drivetrain._driver.arguments import TrainerArguments, check_param_space, checked_config, merge_arguments
    from drivetrain._driver.trainer import DataParallelTrainer
    from drivetrain._hooks.backend import Backend, BackendConfig, WorkerGroup
    from drivetrain._hooks.callback import Callback, Report
    from drivetrain._hooks.context import AttemptInfo, Run, TrainContext, Trial, WorkerInfo
    from drivetrain._hooks.dataset import DatasetProvider, DatasetShard, Shard, SplitRequest, is_instance_of
    from drivetrain._hooks.finding import Finding, run_python
    from drivetrain._hooks.framework import Framework
    from drivetrain._hooks.helpers import (
        ProcessValue,
        node_accelerators,
        reserve_port,
        temporary_environment,
        worker_threads,
    )
    from drivetrain._hooks.policy import FailurePolicy
    from drivetrain._plugins.datasets import OpenedDataset, required_runtime
    from drivetrain._plugins.loading import API_VERSION, load_plugin
    from drivetrain._runtimes.base import Group, GroupOutput, GroupSpec, Runtime
    from drivetrain._runtimes.local import ForkServers, LocalRuntime
    from drivetrain._runtimes.remote import RemoteGroup
    from drivetrain._runtimes.resources import visible_gpus
    from drivetrain._storage.checkpoint import checkpoint_in
    from drivetrain._storage.directory import Storage, open_storage, quick, runs_location
    from drivetrain._storage.lock import RunLock
    from drivetrain._storage.manifest import delete_checkpoints
    from drivetrain._storage.remote import locate
    from drivetrain._wire.handshake import DriverAddress, Introduction, WorkerListener
    from drivetrain._worker.main import worker_main
    from drivetrain._worker.session import saved_by_all_ranks
    from drivetrain._worker.stacks import read_stacks
    from drivetrain.errors import FailureKind
else:
    _SOURCES = {
        "drivetrain._base.console": "Console",
        "drivetrain._base.failure": "Failure",
        "drivetrain._base.metrics": "find_metric flatten",
        "drivetrain._base.outcome": "outcome_of RunOutcome",
        "drivetrain._base.pickling": "dumps",
        "drivetrain._base.redact": "redact",
        "drivetrain._base.wakeup": "Wakeup",
        "drivetrain._driver.arguments": "check_param_space checked_config merge_arguments TrainerArguments",
        "drivetrain._driver.trainer": "DataParallelTrainer",
        "drivetrain._hooks.backend": "Backend BackendConfig WorkerGroup",
        "drivetrain._hooks.callback": "Callback Report",
        "drivetrain._hooks.context": "AttemptInfo Run TrainContext Trial WorkerInfo",
        "drivetrain._hooks.dataset": "DatasetProvider DatasetShard is_instance_of Shard SplitRequest",
        "drivetrain._hooks.framework": "Framework",
        "drivetrain._hooks.finding": "Finding run_python",
        "drivetrain._hooks.helpers": "node_accelerators ProcessValue reserve_port temporary_environment worker_threads",
        "drivetrain._plugins.loading": "API_VERSION load_plugin",
        "drivetrain._hooks.policy": "FailurePolicy",
        "drivetrain._plugins.datasets": "OpenedDataset required_runtime",
        "drivetrain._runtimes.base": "Group GroupOutput GroupSpec Runtime",
        "drivetrain._runtimes.remote": "RemoteGroup",
        "drivetrain._runtimes.local": "ForkServers LocalRuntime",
        "drivetrain._runtimes.resources": "visible_gpus",
        "drivetrain._storage.checkpoint": "checkpoint_in",
        "drivetrain._storage.directory": "open_storage quick runs_location Storage",
        "drivetrain._storage.lock": "RunLock",
        "drivetrain._storage.manifest": "delete_checkpoints",
        "drivetrain._storage.remote": "locate",
        "drivetrain._wire.handshake": "DriverAddress Introduction WorkerListener",
        "drivetrain._worker.main": "worker_main",
        "drivetrain._worker.session": "saved_by_all_ranks",
        "drivetrain._worker.stacks": "read_stacks",
        "drivetrain.errors": "FailureKind",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)

__all__ = [
    "API_VERSION",
    "AttemptInfo",
    "Backend",
    "BackendConfig",
    "Callback",
    "Console",
    "DataParallelTrainer",
    "DatasetProvider",
    "DatasetShard",
    "DriverAddress",
    "Failure",
    "FailureKind",
    "FailurePolicy",
    "Finding",
    "ForkServers",
    "Framework",
    "Group",
    "GroupOutput",
    "GroupSpec",
    "Introduction",
    "LocalRuntime",
    "OpenedDataset",
    "ProcessValue",
    "RemoteGroup",
    "Report",
    "Run",
    "RunLock",
    "RunOutcome",
    "Runtime",
    "Shard",
    "SplitRequest",
    "Storage",
    "TrainContext",
    "TrainerArguments",
    "Trial",
    "Wakeup",
    "WorkerGroup",
    "WorkerInfo",
    "WorkerListener",
    "check_param_space",
    "checked_config",
    "checkpoint_in",
    "delete_checkpoints",
    "dumps",
    "find_metric",
    "flatten",
    "is_instance_of",
    "load_plugin",
    "locate",
    "merge_arguments",
    "node_accelerators",
    "open_storage",
    "outcome_of",
    "quick",
    "read_stacks",
    "redact",
    "required_runtime",
    "reserve_port",
    "run_python",
    "runs_location",
    "saved_by_all_ranks",
    "temporary_environment",
    "visible_gpus",
    "worker_main",
    "worker_threads",
]
