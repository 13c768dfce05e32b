"""Training state as one object. :mod:`drivetrain_torch._statefiles` writes and reads its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.plugin.state import BaseTrainState

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TrainState"]


class TrainState(BaseTrainState):
    """The state of a training: parameters, optimizers, random states, data positions, and the step.

    Creating the object restores it from the checkpoint of the run, if there is one. Create it after the parts, on every
    rank. The number of workers and the wrapper of the model may differ from those when the state was saved.

    Args:
        model: the model, plain or wrapped by ``DistributedDataParallel``, FSDP, ``fully_shard`` or ``torch.compile``.
        optimizer: the optimizer, or a list of optimizers.
        scheduler: the learning rate scheduler.
        scaler: the gradient scaler.
        ema: the averaged parameters: a module such as ``torch.optim.swa_utils.AveragedModel``, or another object.
        loader: the data loader. The position of a loader with ``state_dict`` and ``load_state_dict`` is saved; one with
            ``set_epoch`` receives the number of each epoch.
        sampler: the sampler, if the loader does not contain it.
        mesh: the device mesh of all workers, whose dimensions :func:`prepare_model` describes; None for the mesh with
            which a model or a loader was prepared, if there is one. On another mesh with as many positions in the data,
            each rank continues with the random states and the rows of its position; otherwise, as with another number
            of workers.
        **others: other parts by name: modules, optimizers, loaders, samplers, and all objects with the methods
            ``state_dict`` and ``load_state_dict``. Rank 0's value is saved, except for loaders and samplers.

    Attributes:
        steps: the number of calls of :meth:`step`, including those before the state was restored.
        epoch: the number of completed epochs: the number of the current epoch inside :meth:`epochs`.
        is_restored: True if the state was restored from a checkpoint when it was created.

    Raises:
        CheckpointError: the checkpoint was not written by :meth:`save`, is damaged, or has other entries.
        ConfigurationError: an object has no state, or a name is reserved; or a loader or a dataset is not split as the
            mesh requires.

    Example:
        In a train function, on every rank::

            state = drivetrain_torch.TrainState(model=model, optimizer=optimizer, loader=loader)
            for epoch in state.epochs(10):
                for images, labels in loader:
                    loss = train_step(images, labels)
                    state.step()
                state.save({"loss": loss})
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        *,
        scaler: Any = None,
        ema: Any = None,
        loader: Any = None,
        sampler: Any = None,
        mesh: DeviceMesh | None = None,
        **others: Any,
    ) -> None:
        from drivetrain_torch._mesh import Mesh
        from drivetrain_torch._statefiles import Parts, TorchFiles

        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema}
        parts = Parts.of({**named, "loader": loader, "sampler": sampler, **others})
        super().__init__(TorchFiles(parts, parts.mesh if mesh is None else Mesh.of(mesh, "TrainState")), parts.loaders)
        self.restore()
