"""The public API for plugin authors.

A plugin is an entry point in one of these groups:

========================= ====================================================================
group                     the plugin provides
========================= ====================================================================
``drivetrain.backends``   a :class:`drivetrain.plugin.BackendConfig` class, which sets up a framework
``drivetrain.callbacks``  a :class:`drivetrain.Callback` class, which watches a run
``drivetrain.commands``   a function that adds a command to ``drivetrain``, with :func:`drivetrain_console.add_command`
``drivetrain.datasets``   a :class:`DatasetProvider` class, which splits datasets of one kind
``drivetrain.frameworks`` under the name of a framework's root module, a :class:`Framework` class
``drivetrain.policies``   a :class:`drivetrain.plugin.FailurePolicy` class, or a function
``drivetrain.prepare``    under the name of a framework's root module, a function for :func:`drivetrain.prepare`
``drivetrain.runtimes``   a :class:`Runtime` class, which starts worker groups
``drivetrain.strategies`` a :class:`drivetrain_torch.ParallelStrategy` class, which wraps a PyTorch model
``drivetrain.trainables`` a function that adapts a trainer so that another system can run it
``drivetrain.trainers``   a trainer class, which :func:`drivetrain.restore` finds by its name
``drivetrain.views``      a function that shows a run, for :meth:`drivetrain.Result.view`
========================= ====================================================================

An installed plugin runs no code until it is selected by name, with three exceptions: drivetrain asks every dataset
provider whether it accepts a dataset, every runtime whether the environment selects it, and the plugin of every
framework that a process has imported. A plugin imports ``drivetrain``, ``drivetrain.runs``, this module and its
submodules and, in its tests, ``drivetrain_testing``; everything else in the package is internal. The classes that
plugins derive from are all here; those that users need too are the same objects as in ``drivetrain``.
"""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure
    from drivetrain._hooks.backend import Backend, BackendConfig
    from drivetrain._hooks.callback import Callback, Report
    from drivetrain._hooks.context import Run, TrainContext, WorkerInfo
    from drivetrain._hooks.dataset import DatasetProvider, Shard
    from drivetrain._hooks.framework import Framework
    from drivetrain._hooks.policy import FailurePolicy
    from drivetrain._plugins.loading import API_VERSION, load_plugin
    from drivetrain._runtimes.base import Runtime
else:
    _SOURCES = {
        "drivetrain._base.failure": "Failure",
        "drivetrain._hooks.backend": "Backend BackendConfig",
        "drivetrain._hooks.callback": "Callback Report",
        "drivetrain._hooks.context": "Run TrainContext WorkerInfo",
        "drivetrain._hooks.dataset": "DatasetProvider Shard",
        "drivetrain._hooks.framework": "Framework",
        "drivetrain._hooks.policy": "FailurePolicy",
        "drivetrain._plugins.loading": "API_VERSION load_plugin",
        "drivetrain._runtimes.base": "Runtime",
    }
    _MODULES = (
        "backends callbacks checks datasets drivers files installed processes reading runtimes sessions state storage "
        "trainers warm"
    )
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES, _MODULES)

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendConfig",
    "Callback",
    "DatasetProvider",
    "Failure",
    "FailurePolicy",
    "Framework",
    "Report",
    "Run",
    "Runtime",
    "Shard",
    "TrainContext",
    "WorkerInfo",
    "load_plugin",
]
