"""``restore``: creates a trainer of the class that started a run, to resume the run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from drivetrain._base.redact import redact
from drivetrain._plugins.loading import check_plugin, installed_plugins
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import RUN_FILE
from drivetrain._storage.remote import locate
from drivetrain.errors import ConfigurationError, PluginError, StorageError

if TYPE_CHECKING:
    from drivetrain._driver.arguments import TrainFunction
    from drivetrain._driver.trainer import DataParallelTrainer

__all__ = ["restore"]


def restore(
    path: str | os.PathLike[str],
    train_loop_per_worker: TrainFunction[Any] | None = None,
    *,
    storage_filesystem: Any | None = None,
    **arguments: Any,
) -> DataParallelTrainer:
    """Return a trainer that resumes a run, whichever trainer has started it.

    The trainer's class is found by its name among the entry points of the group ``drivetrain.trainers``. This function
    then calls ``restore`` of that class, which unpickles ``trainer.pkl``, so code that is stored with the run can be
    executed: restore only runs that you trust.

    Args:
        path: the run directory: a local path, a URI, or a path on ``storage_filesystem``.
        train_loop_per_worker: the train function; None for the stored function.
        storage_filesystem: the pyarrow or fsspec filesystem of ``path``; None to select it by the path.
        arguments: other arguments of the trainer, which replace the stored arguments. See
            :meth:`drivetrain.DataParallelTrainer.restore`.

    Raises:
        ConfigurationError: the trainer's class is not registered, or an argument has the wrong type.
        PluginError: the trainer's class cannot be loaded, or several distributions have registered it.
        StorageError: the directory contains no run, or no arguments that can be read.
        SerializationError: a configuration could not be stored, or a stored argument cannot be loaded in this process;
            pass it again.

    Example:
        Continue a run from its latest checkpoint::

            result = drivetrain.restore("~/drivetrain_results/my-run").fit()
    """
    facts = Storage(*locate(path, storage_filesystem, what="restore(path)")).read_json(RUN_FILE)
    if facts is None:
        raise StorageError(f"[DT-707] restore: expected a run directory with {RUN_FILE}, got {redact(os.fspath(path))}")
    # Passed by position, because the parameter has another name in some classes.
    function = [] if train_loop_per_worker is None else [train_loop_per_worker]
    kind = _find_class(facts.text("trainer"))
    return kind.restore(path, *function, storage_filesystem=storage_filesystem, **arguments)


def _find_class(name: str) -> type[DataParallelTrainer]:
    found = [plugin for plugin in installed_plugins("trainer") if plugin.target.rpartition(":")[2] == name]
    if not found:
        raise ConfigurationError(
            f"[DT-708] restore: the run was started by {name}, which is not a registered trainer. Call "
            f"{name}.restore(path), or register the class as an entry point in the group drivetrain.trainers"
        )
    if len(found) > 1:
        owners = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in found)
        raise PluginError(f"[DT-603] restore: several distributions have registered {name}: {owners}. Uninstall one")
    kind: type[DataParallelTrainer] = check_plugin(found[0])
    return kind
