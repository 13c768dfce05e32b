"""What authors of plugins need in addition to ``drivetrain``.

A plugin is an entry point in one of these groups:

========================= ====================================================================
group                     the plugin provides
========================= ====================================================================
``drivetrain.backends``   a :class:`drivetrain.BackendConfig` class: it sets up a framework
``drivetrain.callbacks``  a :class:`drivetrain.Callback` class: it watches a run
``drivetrain.runtimes``   a :class:`Runtime` class: it starts worker groups
``drivetrain.trainables`` a function that turns a trainer into something another system can run
========================= ====================================================================

An installed plugin runs no code until it is selected by its name. A plugin imports ``drivetrain``, this module and, in
its tests, ``drivetrain.testing``; everything else in the package is internal. The classes of runtimes are provisional:
they may change until a second cluster runtime uses them.
"""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain._base.console import Console
    from drivetrain._base.redact import redact
    from drivetrain._driver.arguments import check_param_space, merge_arguments
    from drivetrain._driver.launch import required_runtime
    from drivetrain._hooks.context import Trial
    from drivetrain._hooks.plugins import API_VERSION
    from drivetrain._runtimes.base import Group, GroupSpec, Runtime, rank_environment
    from drivetrain._runtimes.local import ForkServers, LocalRuntime
    from drivetrain._runtimes.remote import RemoteGroup
    from drivetrain._runtimes.resources import visible_gpus
    from drivetrain._storage.directory import Storage, open_storage, quick, runs_location
    from drivetrain._storage.lock import RunLock
    from drivetrain._storage.remote import locate
    from drivetrain._wire.task import TrainTask
    from drivetrain.loggers.tracker import Entry, Ranks, TrackerCallback, numbers, parameters
else:
    _SOURCES = {
        "drivetrain._storage.remote": "locate",
        "drivetrain._storage.lock": "RunLock",
        "drivetrain._storage.directory": "Storage open_storage quick runs_location",
        "drivetrain._runtimes.resources": "visible_gpus",
        "drivetrain._runtimes.local": "ForkServers LocalRuntime",
        "drivetrain._hooks.context": "Trial",
        "drivetrain._driver.launch": "required_runtime",
        "drivetrain._driver.arguments": "check_param_space merge_arguments",
        "drivetrain._base.console": "Console",
        "drivetrain._base.redact": "redact",
        "drivetrain._hooks.plugins": "API_VERSION",
        "drivetrain._runtimes.base": "Group GroupSpec Runtime rank_environment",
        "drivetrain._runtimes.remote": "RemoteGroup",
        "drivetrain._wire.task": "TrainTask",
        "drivetrain.loggers.tracker": "Entry Ranks TrackerCallback numbers parameters",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)

__all__ = [
    "API_VERSION",
    "Console",
    "Entry",
    "ForkServers",
    "Group",
    "GroupSpec",
    "LocalRuntime",
    "Ranks",
    "RemoteGroup",
    "RunLock",
    "Runtime",
    "Storage",
    "TrackerCallback",
    "TrainTask",
    "Trial",
    "check_param_space",
    "locate",
    "merge_arguments",
    "numbers",
    "open_storage",
    "parameters",
    "quick",
    "rank_environment",
    "redact",
    "required_runtime",
    "runs_location",
    "visible_gpus",
]
