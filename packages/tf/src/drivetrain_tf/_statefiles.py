"""The variables of a :class:`~drivetrain_tf.TrainState`: as named arrays, and back.

The names contain the position of a variable in its part. Keras's own names depend on how many layers the process has
created before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drivetrain import ConfigurationError
from drivetrain.plugin.arrays import ArrayEntry, ArrayFiles, StoredArray
from drivetrain.plugin.state import check_names

__all__ = ["VariableFiles"]


class VariableFiles(ArrayFiles):
    """Writes and reads the variables of a training state.

    Args:
        parts: models, optimizers and other parts with variables, by name.
        objects: see :class:`~drivetrain.plugin.arrays.ArrayFiles`.

    Raises:
        ConfigurationError: a part has no variables, or is not built.
    """

    def __init__(self, parts: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
        super().__init__(objects)
        check_names(parts)
        self._parts = parts
        self._values: dict[str, np.ndarray[Any, Any]] = {}
        _build_optimizers(parts)
        self._variables(only_parameters=False)

    def write(self, directory: str, common: Mapping[str, Any], *, verify: bool) -> None:
        """Read the variables on every rank, because some of them are averages over all ranks, and write the files."""
        variables = self._variables(only_parameters=False)
        self._values = {name: np.asarray(variable.numpy()) for name, variable in variables.items()}
        super().write(directory, common, verify=verify)
        self._values = {}

    def entries(self, *, only_parameters: bool) -> dict[str, ArrayEntry]:
        """Return the variables by name."""
        return {
            name: ArrayEntry(
                dtype=np.dtype(getattr(variable.dtype, "name", variable.dtype)).name,
                shape=tuple(variable.shape),
                notes={},
                is_chunked=False,
                parts=self._value(name),
            )
            for name, variable in self._variables(only_parameters=only_parameters).items()
        }

    def assign(self, arrays: Mapping[str, StoredArray]) -> None:
        """Assign arrays to the variables that they belong to."""
        for name, variable in self._variables(only_parameters=False).items():
            if name in arrays:
                variable.assign(arrays[name].read())

    def _value(self, name: str) -> Iterator[tuple[None, np.ndarray[Any, Any]]]:
        yield None, self._values[name]

    def _variables(self, *, only_parameters: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part_name, part in self._parts.items():
            if only_parameters and _is_optimizer(part):
                continue
            for index, variable in enumerate(_variables_of(part_name, part)):
                is_named = not _is_optimizer(part)
                name = f"/{variable.name.rpartition('/')[2].partition(':')[0]}" if is_named else ""
                found[f"{part_name}/{index}{name}"] = variable
        return found


def _is_optimizer(part: object) -> bool:
    return hasattr(part, "apply_gradients")


def _is_variable(part: object) -> bool:
    return hasattr(part, "assign") and hasattr(part, "shape")


def _variables_of(name: str, part: Any) -> list[Any]:
    """Return the variables of a part in their order, without those of metrics, which exist only during an epoch."""
    if _is_variable(part):
        return [part]
    if _is_variable(getattr(part, "state", None)):  # of a random generator
        return [part.state]
    found = getattr(part, "variables", None)
    variables = _as_list(found)
    if found is None or not getattr(part, "built", True):
        raise ConfigurationError(
            f"[DT-812] TrainState({name}=...): expected a model that is built, an optimizer, a variable, a random "
            f"generator, or an object with the methods state_dict and load_state_dict, got {part!r:.200}. Give a model "
            "an Input, or call it on a batch before; call optimizer.build(model.trainable_variables)"
        )
    rate = getattr(part, "learning_rate", None) if _is_optimizer(part) else None
    if _is_variable(rate):  # which Keras 2 does not list
        variables += [rate]
    metrics = {id(variable) for metric in _as_list(getattr(part, "metrics", None)) for variable in metric.variables}
    return list({id(variable): variable for variable in variables if id(variable) not in metrics}.values())


def _as_list(found: Any) -> list[Any]:
    """Return a sequence, or what a method returns, as a list: Keras and TensorFlow have both."""
    if found is not None and not isinstance(found, Sequence) and callable(found):
        found = found()
    return list(found or ())


def _build_optimizers(parts: Mapping[str, Any]) -> None:
    """Create the variables of optimizers, which Keras does in the first step, if it is clear for which model."""
    models = [part for part in parts.values() if hasattr(part, "distribute_strategy")]
    for optimizer in parts.values():
        can_build = _is_optimizer(optimizer) and hasattr(optimizer, "build")
        if can_build and len(models) == 1 and not getattr(optimizer, "built", False):
            with models[0].distribute_strategy.scope():
                optimizer.build(models[0].trainable_variables)
