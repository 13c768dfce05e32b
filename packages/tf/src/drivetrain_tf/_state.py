"""Training state as one object. :mod:`drivetrain_tf._statefiles` writes and reads its files."""

from __future__ import annotations

from typing import Any

from drivetrain.plugin.state import BaseTrainState, check_parts

__all__ = ["TrainState"]


class TrainState(BaseTrainState):
    """The state of a training with Keras 3, Keras 2 or TensorFlow's variables.

    It contains the variables of its parts, the random states of Python and NumPy, data positions, and the step.
    Creating the object restores it from the checkpoint of the run, if there is one. Create it after the parts, on every
    rank. The number of workers may differ from that when the state was saved.

    The random numbers of Keras 3's layers, and of a ``keras.random.SeedGenerator`` or a ``tf.random.Generator`` that is
    passed, are restored. Those of ``keras.random`` without a seed, of operations such as ``tf.random.uniform``, and of
    Keras 2's layers are not: neither library returns the state of these generators.

    Args:
        model: the model, built: it has an input shape, or was called. Metrics are not part of the state.
        optimizer: the optimizer; None for that of a compiled model. It is built if there is one model.
        loader: the data loader. The position of a loader with ``state_dict`` and ``load_state_dict`` is saved; one with
            ``set_epoch`` receives the number of each epoch. The position in a ``tf.data.Dataset`` is not saved.
        sampler: the sampler, if the loader does not contain it.
        **others: other parts by name: models, layers, optimizers, variables, modules, random generators, and all
            objects with the methods ``state_dict`` and ``load_state_dict``, whose states consist of numbers, strings,
            arrays, and lists and mappings of them.

    Attributes:
        steps: the number of calls of :meth:`step`, including those before the state was restored.
        epoch: the number of completed epochs: the number of the current epoch inside :meth:`epochs`.
        is_restored: True if the state was restored from a checkpoint when it was created.

    Raises:
        CheckpointError: the checkpoint was not written by :meth:`save`, is damaged, or has other variables.
        ConfigurationError: an object has no state, a name is reserved, or a model or an optimizer is not built.

    Example:
        In a train function, on every rank::

            state = TrainState(model, optimizer)
            for epoch in state.epochs(10):
                for images, labels in batches:
                    loss = train_step(images, labels)
                    state.step()
                state.save({"loss": loss})
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        loader: Any = None,
        sampler: Any = None,
        **others: Any,
    ) -> None:
        from drivetrain_tf._statefiles import VariableFiles

        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        given = {"model": model, "optimizer": optimizer, **others}
        parts = {name: value for name, value in given.items() if value is not None}
        objects = {name: value for name, value in parts.items() if hasattr(value, "load_state_dict")}
        loaders = {name: value for name, value in {"loader": loader, "sampler": sampler}.items() if value is not None}
        check_parts(objects, loaders=loaders)
        variables = {name: value for name, value in parts.items() if name not in objects}
        super().__init__(VariableFiles(variables, objects), loaders)
        self.restore()
