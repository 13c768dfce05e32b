"""Training state as one object. :mod:`drivetrain_jax._statefiles` writes and reads its files."""

from __future__ import annotations

from typing import Any

from drivetrain import ConfigurationError
from drivetrain.plugin.state import COMMON_ENTRIES, BaseTrainState, check_names, check_parts

__all__ = ["TrainState"]

_COUNTERS = ("steps", "epoch", "is_restored")
_LOADERS = ("loader", "sampler")
_METHODS = tuple(name for name in dir(BaseTrainState) if not name.startswith("_"))


class TrainState(BaseTrainState):
    """The state of a training: pytrees, random states, data positions, and the step.

    Creating the object restores it from the checkpoint of the run, if there is one. The pytrees are attributes, to
    which the training loop assigns new values. Create the object on every rank, with pytrees of the same structure as
    when it was saved, and with arrays that are where the training needs them: the restored arrays have the same
    sharding. The number of workers and the sharding may differ from those when the state was saved.

    The leaves of the pytrees are arrays of JAX and NumPy, random keys, and numbers. Leave out others, such as
    functions: ``eqx.filter(model, eqx.is_array)`` in Equinox, ``nnx.state(model)`` in Flax NNX.

    Args:
        params: the parameters.
        opt_state: the state of the optimizer, such as the return value of ``optimizer.init(params)`` in Optax.
        key: a random key, or several.
        loader: the data loader. The position of a loader with ``state_dict`` and ``load_state_dict`` is saved; one with
            ``set_epoch`` receives the number of each epoch.
        sampler: the sampler, if the loader does not contain it.
        **others: other pytrees by name, and objects with the methods ``state_dict`` and ``load_state_dict``, whose
            states consist of numbers, strings, arrays, and lists and mappings of them. Rank 0's value is saved. Of an
            array that is divided among the workers, each saves its part.

    Attributes:
        steps: the number of calls of :meth:`step`, including those before the state was restored.
        epoch: the number of completed epochs: the number of the current epoch inside :meth:`epochs`.
        is_restored: True if the state was restored from a checkpoint when it was created.

    Raises:
        CheckpointError: the checkpoint was not written by :meth:`save`, is damaged, or has other leaves.
        ConfigurationError: a leaf is neither an array nor a number, an object has no state, or a name is reserved.

    Example:
        In a train function, on every rank::

            state = TrainState(params=params, opt_state=optimizer.init(params), key=jax.random.key(0), loader=loader)
            for epoch in state.epochs(10):
                for batch in loader:
                    state.params, state.opt_state, loss = update(state.params, state.opt_state, batch)
                    state.step()
                state.save({"loss": float(loss)})
    """

    _trees: dict[str, Any]

    def __init__(
        self,
        *,
        params: Any = None,
        opt_state: Any = None,
        key: Any = None,
        loader: Any = None,
        sampler: Any = None,
        **others: Any,
    ) -> None:
        from drivetrain_jax._statefiles import JaxFiles

        check_names(others, (*COMMON_ENTRIES, *_COUNTERS, *_METHODS))
        given = {"params": params, "opt_state": opt_state, "key": key, **others}
        objects = {name: value for name, value in given.items() if hasattr(value, "load_state_dict")}
        loaders = {name: value for name, value in zip(_LOADERS, (loader, sampler), strict=True) if value is not None}
        check_parts(objects, loaders=loaders)
        self._trees = {name: value for name, value in given.items() if value is not None and name not in objects}
        super().__init__(JaxFiles(self._trees, objects), loaders)
        self.restore()

    def __getattr__(self, name: str) -> Any:
        """Return a pytree. Called for names that are no ordinary attributes."""
        trees = self.__dict__.get("_trees", {})
        if name not in trees:
            raise AttributeError(f"expected the name of a pytree of the TrainState ({', '.join(trees)}), got {name!r}")
        return trees[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a pytree. A misspelled name is an error, because its value would not be saved."""
        if name in self.__dict__.get("_trees", {}):
            self._trees[name] = value
        elif name.startswith("_") or name in _COUNTERS:
            super().__setattr__(name, value)
        else:
            raise ConfigurationError(
                f"[DT-812] TrainState: expected the name of one of its pytrees ({', '.join(self._trees)}), got "
                f"{name!r}. Pass the pytree when you create the object: TrainState(..., {name}=...)"
            )
