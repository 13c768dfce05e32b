"""The reporting callback for Keras 3 and for Keras 2 (``tf_keras``).

Importing this module does not import Keras. Each worker imports Keras on first use.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import Checkpoint, ConfigurationError, get_context, get_preemption_info, report, resume_later

if TYPE_CHECKING:
    from typing_extensions import Self

    from drivetrain_tf._state import TrainState

__all__ = ["ReportCheckpointCallback"]

_EVENTS = frozenset(
    f"{phase}_{boundary}"
    for phase in ("train", "test", "predict", "train_batch", "test_batch", "predict_batch", "epoch")
    for boundary in ("begin", "end")
)
_STEP, _STEP_END, _EPOCH_END = "train_batch_begin", "train_batch_end", "epoch_end"


class ReportCheckpointCallback:
    """Reports Keras's metrics, with a checkpoint of the model, while ``Model.fit`` trains.

    This is a callback of the Keras version that the process has loaded: ``tf_keras`` if that is loaded, otherwise
    ``tf.keras``. Every rank reports. All ranks save the model, because saving under a strategy requires all ranks. The
    checkpoint contains the file that rank 0 saves.

    With ``state``, each checkpoint contains this state instead of the model's file, so that a resumed run continues
    with the same weights, optimizer and random numbers. Pass ``initial_epoch=state.epoch`` to ``fit()``. An epoch that
    was saved before its end is repeated.

    On a preemption, all ranks save at the same step, report, and stop. ``fit()`` then returns, and the run is resumed
    after the train function has returned (:func:`drivetrain.resume_later`).

    Args:
        checkpoint_on: the event or events at which a checkpoint is reported along with the metrics. An event is the
            name of a Keras hook without ``on_``, such as ``"epoch_end"`` or ``"train_end"``.
        report_metrics_on: the event or events at which metrics are reported. If an event is also in ``checkpoint_on``,
            there is one report, with the checkpoint.
        metrics: the metrics to report: a name, several names, or a mapping from your names to Keras's names. None for
            all metrics that Keras passes to the hook.
        filename: the file name of the model in a checkpoint. The suffix selects the content. ``*.keras`` contains the
            model with the optimizer's state. ``*.weights.h5`` contains only the weights. With Keras 2, a name
            without a suffix selects the SavedModel format, which contains the model and the optimizer's state.
        state: the state of the training, to save it instead of the model's file.

    Raises:
        ConfigurationError: an event is unknown.

    Example:
        In a train function::

            state = TrainState(model)
            callback = ReportCheckpointCallback(metrics=["loss"], state=state)
            model.fit(dataset, epochs=3, initial_epoch=state.epoch, callbacks=[callback])
    """

    model: Any  # set by Keras

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create an instance of a class that also derives from Keras's ``Callback``."""
        derived: type[Self] = _derived(cls, _keras_callback())
        return object.__new__(derived)

    def __init__(
        self,
        checkpoint_on: str | Iterable[str] = "epoch_end",
        report_metrics_on: str | Iterable[str] = "epoch_end",
        metrics: str | Iterable[str] | Mapping[str, str] | None = None,
        *,
        filename: str = "model.keras",
        state: TrainState | None = None,
    ) -> None:
        super().__init__()
        names = [metrics] if isinstance(metrics, str) else metrics
        self._names = names if isinstance(names, Mapping) or names is None else {name: name for name in names}
        self._saving = _events("checkpoint_on", checkpoint_on)
        self._reporting = self._saving | _events("report_metrics_on", report_metrics_on)
        self._filename = filename
        self._state = state
        self._is_preempted = False
        # Set only the hooks that are needed: Keras calls every hook that is overridden, which takes time in each batch.
        counted = {_STEP_END, _EPOCH_END} if state is not None else set()
        for event in self._reporting | {_STEP} | counted:
            setattr(self, f"on_{event}", functools.partial(self._on, event))

    def _on(self, event: str, *arguments: Any, **options: Any) -> None:
        """Handle a Keras event. If Keras passes logs, they are the only argument that is a mapping."""
        getattr(type(self), f"on_{event}")(self, *arguments, **options)
        if self._is_preempted:
            return
        if self._state is not None:
            self._count(self._state, event, *arguments, **options)
        if event == _STEP and get_preemption_info() is not None:
            self._is_preempted = self.model.stop_training = True
            self._report({}, saving=True)
            resume_later()
        elif event in self._reporting:
            logs = next((value for value in (*arguments, *options.values()) if isinstance(value, Mapping)), {})
            self._report(self._select(logs), saving=event in self._saving)

    def _count(self, state: TrainState, event: str, index: int | None = None, *_: Any, **options: Any) -> None:
        """Count a step or an epoch. Keras passes the number of the epoch first."""
        if event == _STEP_END:
            state.steps += 1
        elif event == _EPOCH_END:
            state.epoch = (options["epoch"] if index is None else index) + 1

    def _select(self, logs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._names is None:
            return logs
        if missing := [name for name in self._names.values() if name not in logs]:
            raise ConfigurationError(
                f"ReportCheckpointCallback(metrics=...): expected names of metrics "
                f"({', '.join(map(repr, logs)) or 'this event has none'}), got {', '.join(map(repr, missing))}. "
                "Remove the name, add it to compile(metrics=[...]), or report on another event"
            )
        return {name: logs[source] for name, source in self._names.items()}

    def _report(self, metrics: Mapping[str, Any], *, saving: bool) -> None:
        if not saving:
            report(metrics)
            return
        if self._state is not None:
            self._state.save(metrics)
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
            f"ReportCheckpointCallback({argument}=...): expected Keras events ({', '.join(sorted(_EVENTS))}), got "
            f"{', '.join(map(repr, unknown))}"
        )
    return events


def _keras_callback() -> type[Any]:
    """Return the ``Callback`` class of Keras 2 if Keras 2 is loaded, and otherwise of ``tf.keras``.

    If both versions are loaded, the class of Keras 2 fits both, because Keras 3 also accepts callbacks of Keras 2.
    """
    import tensorflow as tf

    keras = sys.modules.get("tf_keras") or tf.keras
    base: type[Any] = keras.callbacks.Callback
    return base


def _derived(cls: type[Any], base: type[Any]) -> type[Any]:
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {"__doc__": cls.__doc__})
