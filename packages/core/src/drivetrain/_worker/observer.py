"""Lets an observer follow a train function: its batches, its reports, and the checkpoints from which it resumes.

``drivetrain prove`` compares a resumed run with an undisturbed one in this way. Without an observer, each call costs
one comparison.
"""

from __future__ import annotations

import os
import pkgutil
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._hooks.context import TrainContext

__all__ = [
    "OBSERVER",
    "Observer",
    "current_observer",
    "end_observer",
    "note_batch",
    "observer_variables",
    "start_observer",
]

OBSERVER = "DRIVETRAIN_OBSERVER"
"""The environment variable with the observer of every worker: a subclass of :class:`Observer` as ``module:Class``.

The driver passes it, and all variables whose names begin with it, to workers on other machines, too.
"""


class Observer:
    """Base of the classes that :data:`OBSERVER` names. Each worker creates one object for each call of its function.

    Every method is called in the worker, by the thread of the train function, which continues when it returns. An
    exception in a method ends the train function.
    """

    def on_start(self, context: TrainContext, iteration: int) -> None:
        """Observe the start of the train function.

        Args:
            context: the ranks, names and directories of the worker.
            iteration: the iteration of the report from whose checkpoint the run resumes; 0 if there is none.
        """

    def on_resume(self, iteration: int) -> None:
        """Observe that this worker stays, and continues from the checkpoint of an iteration, because another was lost.

        A thread that receives the driver's commands calls this method.
        """

    def on_checkpoint_read(self) -> None:
        """Observe a call of :func:`drivetrain.get_checkpoint` that returns a checkpoint."""

    def on_batch(self, batch: Any, number: int, repeated: int) -> None:
        """Observe a batch that the train function is about to receive: see :func:`note_batch`."""

    def before_report(self, iteration: int) -> None:
        """Observe the start of a call of :func:`drivetrain.report`, before anything is sent or stored."""

    def on_report(self, iteration: int, has_checkpoint: bool) -> None:
        """Observe the end of a call of :func:`drivetrain.report`, whose ``_training_iteration`` is ``iteration``."""

    def on_end(self) -> None:
        """Observe the end of the train function, also after an exception."""


_observer: Observer | None = None


def observer_variables() -> dict[str, str]:
    """Return the environment variables of the observer, if there is one, for workers that do not inherit them."""
    if not os.environ.get(OBSERVER):
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith(OBSERVER)}


def note_batch(batch: Any, number: int = 0, repeated: int = 0) -> None:
    """Show a batch to the observer of this worker, if there is one. Loaders call it before they yield a batch.

    ``prepare_data_loader`` and the datasets of drivetrain call it. A plugin or a train function whose batches come from
    elsewhere calls it for each batch, so that ``drivetrain prove`` can compare the rows that a resumed run reads.

    Args:
        batch: the batch: an array or a tensor whose first dimension counts the rows, a table, a list of rows, or a
            mapping or tuple of arrays.
        number: the number of the batch in its epoch; 0 begins an epoch.
        repeated: the number of rows at the end of the batch that are repetitions, so that all ranks have equally many.

    Example:
        >>> note_batch([1, 2, 3])
    """
    if _observer is not None:
        _observer.on_batch(batch, number, repeated)


def current_observer() -> Observer | None:
    """Return the observer of this worker; None if there is none."""
    return _observer


def start_observer(context: TrainContext, iteration: int) -> None:
    """Create the observer that the environment names, and start it.

    Raises:
        ConfigurationError: the environment names no class of this kind.
    """
    global _observer
    name = os.environ.get(OBSERVER)
    if not name:
        return
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"[DT-101] {OBSERVER}: expected an importable class as module:Class, got {name!r}: {error}. Install its "
            "package for the workers, or unset the variable"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        raise ConfigurationError(f"[DT-101] {OBSERVER}: expected a subclass of Observer, got {name!r}. Unset it")
    observer = kind()
    observer.on_start(context, iteration)
    _observer = observer


def end_observer() -> None:
    """End the observer of this worker, if there is one."""
    global _observer
    observer, _observer = _observer, None
    if observer is not None:
        observer.on_end()
