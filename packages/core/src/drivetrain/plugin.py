"""What authors of plugins need in addition to ``drivetrain``.

A plugin is an entry point in one of these groups:

======================== =====================================================================
group                    the plugin provides
======================== =====================================================================
``drivetrain.backends``  a :class:`drivetrain.BackendConfig` class: it sets up a framework
``drivetrain.callbacks`` a :class:`drivetrain.Callback` class: it watches a run
``drivetrain.datasets``  a :class:`DatasetProvider` class: it splits datasets of one kind
``drivetrain.runtimes``  a :class:`Runtime` class: it starts worker groups
======================== =====================================================================

An installed plugin runs no code until it is selected by its name, except for dataset providers: each is asked whether
it accepts a dataset. A plugin imports ``drivetrain``, this module and, in its tests, ``drivetrain.testing``; everything
else in the package is internal. The classes of runtimes are provisional: they may change until a second cluster runtime
uses them.
"""

from typing import TYPE_CHECKING

from drivetrain._base.lazy import lazy_names

if TYPE_CHECKING:
    from drivetrain._base.console import Console
    from drivetrain._base.redact import redact
    from drivetrain._hooks.dataset import DatasetProvider, Shard, SplitRequest, is_instance_of
    from drivetrain._hooks.plugins import API_VERSION
    from drivetrain._hooks.providers import OpenedDataset, required_runtime
    from drivetrain._runtimes.base import Group, GroupSpec, Runtime, rank_environment
    from drivetrain._runtimes.remote import RemoteGroup
    from drivetrain._wire.task import TrainTask
    from drivetrain.loggers.tracker import Entry, Ranks, TrackerCallback, numbers, parameters
else:
    _SOURCES = {
        "drivetrain._base.console": "Console",
        "drivetrain._base.redact": "redact",
        "drivetrain._hooks.dataset": "DatasetProvider Shard SplitRequest is_instance_of",
        "drivetrain._hooks.plugins": "API_VERSION",
        "drivetrain._hooks.providers": "OpenedDataset required_runtime",
        "drivetrain._runtimes.base": "Group GroupSpec Runtime rank_environment",
        "drivetrain._runtimes.remote": "RemoteGroup",
        "drivetrain._wire.task": "TrainTask",
        "drivetrain.loggers.tracker": "Entry Ranks TrackerCallback numbers parameters",
    }
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)

__all__ = [
    "API_VERSION",
    "Console",
    "DatasetProvider",
    "Entry",
    "Group",
    "GroupSpec",
    "OpenedDataset",
    "Ranks",
    "RemoteGroup",
    "Runtime",
    "Shard",
    "SplitRequest",
    "TrackerCallback",
    "TrainTask",
    "is_instance_of",
    "numbers",
    "parameters",
    "rank_environment",
    "redact",
    "required_runtime",
]
