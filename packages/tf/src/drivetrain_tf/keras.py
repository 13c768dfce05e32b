"""Keras in a drivetrain run, of both generations: Keras 3, and Keras 2 (``tf_keras``).

Importing this module does not import Keras: a worker does, once it needs it.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import Checkpoint, ConfigurationError, get_context, get_preemption_info, report

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ReportCheckpointCallback"]

_EVENTS = frozenset(
    f"{what}_{when}"
    for what in ("train", "test", "predict", "train_batch", "test_batch", "predict_batch", "epoch")
    for when in ("begin", "end")
)
_EACH_STEP = "train_batch_begin"


class ReportCheckpointCallback:
    """Reports Keras's metrics, with a checkpoint of the model, while ``Model.fit`` trains.

    It is a callback of the Keras that the process has loaded: ``tf_keras`` if it has, otherwise ``tf.keras``. Every
    rank reports. All of them save, for under a strategy that takes all; the checkpoint has rank 0's file.

    On a preemption all ranks save at the same step, report, and stop; ``fit()`` then returns.

    Args:
        checkpoint_on: the event, or events, after which a checkpoint is reported, along with the metrics: Keras's hooks
            without their ``on_``, such as ``"epoch_end"`` or ``"train_end"``.
        report_metrics_on: the event, or events, after which metrics are reported.
        metrics: which to report: a name, several, or a mapping from names of your choice to Keras's; None for all that
            Keras has at that event.
        filename: of the model in a checkpoint. ``*.keras`` and a name without an ending (with Keras 2: a SavedModel)
            have the optimizer's state, ``*.weights.h5`` only weights.

    Raises:
        ConfigurationError: an event is unknown.

    Example:
        In a train function::

            model.fit(dataset, epochs=3, callbacks=[ReportCheckpointCallback(metrics=["loss"])])
    """

    model: Any  # Keras's

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """An instance of a class that is derived from Keras's ``Callback`` as well."""
        derived: type[Self] = _derived(cls, _keras_callback())
        return object.__new__(derived)

    def __init__(
        self,
        checkpoint_on: str | Iterable[str] = "epoch_end",
        report_metrics_on: str | Iterable[str] = "epoch_end",
        metrics: str | Iterable[str] | Mapping[str, str] | None = None,
        *,
        filename: str = "model.keras",
    ) -> None:
        super().__init__()
        names = [metrics] if isinstance(metrics, str) else metrics
        self._names = names if isinstance(names, Mapping) or names is None else {name: name for name in names}
        self._saving = _events("checkpoint_on", checkpoint_on)
        self._reporting = self._saving | _events("report_metrics_on", report_metrics_on)
        self._filename = filename
        self._is_preempted = False
        # Keras calls what an instance or a class overrides, and each event of a batch costs it time.
        for event in self._reporting | {_EACH_STEP}:
            setattr(self, f"on_{event}", functools.partial(self._on, event))

    def _on(self, event: str, *arguments: Any, **options: Any) -> None:
        """Keras's hook for an event: its arguments end with the logs, if there are any."""
        getattr(type(self), f"on_{event}")(self, *arguments, **options)
        if self._is_preempted:
            return
        if event == _EACH_STEP and get_preemption_info() is not None:
            self._is_preempted = self.model.stop_training = True
            self._report({}, saving=True)
        elif event in self._reporting:
            logs = next((value for value in (*arguments, *options.values()) if isinstance(value, Mapping)), {})
            self._report(self._select(logs), saving=event in self._saving)

    def _select(self, logs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._names is None:
            return logs
        if missing := [name for name in self._names.values() if name not in logs]:
            raise ConfigurationError(
                f"ReportCheckpointCallback(metrics=...): expected {', '.join(map(repr, missing))}, got "
                f"{', '.join(map(repr, logs)) or 'no metric at all'}: take the name out, give it to "
                "compile(metrics=[...]), or report on another event"
            )
        return {name: logs[source] for name, source in self._names.items()}

    def _report(self, metrics: Mapping[str, Any], *, saving: bool) -> None:
        if not saving:
            report(metrics)
            return
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, self._filename)
            save = self.model.save_weights if self._filename.endswith(".weights.h5") else self.model.save
            save(path)
            is_first = get_context().get_world_rank() == 0
            report(metrics, Checkpoint.from_directory(directory) if is_first else None)


def _events(argument: str, given: str | Iterable[str]) -> frozenset[str]:
    events = frozenset([given] if isinstance(given, str) else given)
    if unknown := sorted(events - _EVENTS):
        raise ConfigurationError(
            f"ReportCheckpointCallback({argument}=...): expected events of Keras ({', '.join(sorted(_EVENTS))}), got "
            f"{', '.join(map(repr, unknown))}"
        )
    return events


def _keras_callback() -> type[Any]:
    """The base class of callbacks: Keras 2's where it is loaded, which Keras 3 takes as well, but not the reverse."""
    import tensorflow as tf

    keras = sys.modules.get("tf_keras") or tf.keras
    base: type[Any] = keras.callbacks.Callback
    return base


def _derived(cls: type[Any], base: type[Any]) -> type[Any]:
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {"__doc__": cls.__doc__})
