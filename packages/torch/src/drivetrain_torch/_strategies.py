"""The ways to train one model on several workers: the interface of a strategy, and the strategies of PyTorch."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, get_context
from drivetrain_torch._mesh import Mesh
from drivetrain_torch._names import is_dtensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DDPStrategy", "FSDP2Strategy", "FSDPStrategy", "ParallelStrategy"]


class ParallelStrategy(ABC):
    """A way to train one model on several workers. Entry points in ``drivetrain.strategies`` refer to subclasses.

    ``prepare_model(parallel_strategy=NAME)`` creates an object with the keyword arguments in
    ``parallel_strategy_kwargs``. All arguments of the class must have default values.
    """

    @abstractmethod
    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Return the model in a form that all workers train together.

        Called on every worker, if there are several. All workers have joined the process group.

        Args:
            model: the model, the same on every worker. It is on the device, unless the user turned that off.
            device: the device of this worker.
        """

    def wrap_exact(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Return the model like :meth:`wrap`, for ``prepare_model(exact=True)``.

        Override this method if the first step of a process adds gradients in another order than its later steps. The
        base class calls :meth:`wrap`.
        """
        return self.wrap(model, device)

    def on_mesh(self, mesh: DeviceMesh) -> ParallelStrategy:
        """Return the strategy for one mesh, whose methods are called instead, for ``prepare_model(mesh=...)``.

        Override this method if the strategy can average gradients over some dimensions of a mesh only.

        Args:
            mesh: a mesh of all workers, whose dimensions have the names that :func:`prepare_model` describes. See
                :func:`drivetrain.plugin.datasets.mesh_kinds`.

        Raises:
            ConfigurationError: the strategy does not support this mesh. The base class supports none.
        """
        raise ConfigurationError(
            "[DT-729] prepare_model(mesh=...): expected a strategy that supports device meshes ('ddp', 'fsdp' or "
            f"'fsdp2'), got {type(self).__name__}. Use one of them, or remove mesh"
        )


class DDPStrategy(ParallelStrategy):
    """``DistributedDataParallel``: every worker has the whole model, and the gradients are averaged.

    A model without trainable parameters is returned as it is, because there are no gradients.

    Args:
        **options: further arguments of the wrapper.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_mesh(self, mesh: DeviceMesh) -> DDPStrategy:
        """Average the gradients over the data, replicate and context dimensions."""
        checked = Mesh.of(mesh, "prepare_model")
        if (name := checked.kinds.get("shard")) is not None and checked.size_of(name) > 1:
            raise ConfigurationError(
                "[DT-729] prepare_model(parallel_strategy='ddp', mesh=...): expected a mesh without a shard dimension, "
                f"because every worker has the whole model, got {name!r} of size {checked.size_of(name)}. Use "
                "parallel_strategy='fsdp2', or name the dimension 'dp'"
            )
        return DDPStrategy(**{"process_group": checked.averaging_group(), **self._options})

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Wrap the model. On a GPU, the wrapper also moves the inputs."""
        import torch

        _refuse_dtensors(model, "ddp")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        options = self._options
        if device.type == "cuda" and {parameter.device for parameter in model.parameters()} == {device}:
            options = {"device_ids": [device], "output_device": device, **options}
        return torch.nn.parallel.DistributedDataParallel(model, **options)

    def wrap_exact(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Wrap the model so that every step adds the gradients in the same order.

        After the first step of a process, the wrapper sorts the gradients into new buckets. The position in a bucket
        determines the order in which the values of three or more workers are added, so a resumed run would differ from
        an undisturbed one. The wrapper keeps its buckets if it looks for unused parameters in every step.
        """
        if self._options.get("static_graph"):
            raise ConfigurationError(
                "[DT-722] prepare_model(exact=True): expected no static_graph=True, with which "
                "DistributedDataParallel changes the order of additions after the first step. Remove it, or pass "
                "exact=False (enable_reproducibility() implies exact=True)"
            )
        exact = copy.copy(self)
        group = self._options.get("process_group")
        if (get_context().get_world_size() if group is None else group.size()) > 2:
            exact._options = {**self._options, "find_unused_parameters": True}
        return exact.wrap(model, device)


class FSDPStrategy(ParallelStrategy):
    """``FullyShardedDataParallel``: every worker has a part of each parameter. Create optimizers afterwards.

    Args:
        **options: further arguments of the wrapper.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_mesh(self, mesh: DeviceMesh) -> FSDPStrategy:
        """Shard along one dimension of the mesh, and replicate along another one, if there are two."""
        from torch.distributed.fsdp import ShardingStrategy

        devices = Mesh.of(mesh, "prepare_model").sharding_mesh()
        hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD} if devices.ndim == 2 else {}
        return FSDPStrategy(**{"device_mesh": devices, **hybrid, **self._options})

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Wrap the model."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        _refuse_dtensors(model, "fsdp")
        return FullyShardedDataParallel(model, **{"device_id": device, **self._options})


class FSDP2Strategy(ParallelStrategy):
    """``fully_shard``: every worker has a part of each parameter, which is a ``DTensor``. Create optimizers afterwards.

    Args:
        modules: classes of submodules, such as the layers of a transformer. Each such submodule is sharded as a unit,
            whose parameters are gathered together. Without classes, the whole model is one unit.
        **options: further arguments of ``fully_shard``.
    """

    def __init__(self, modules: Sequence[type[torch.nn.Module]] = (), **options: Any) -> None:
        self._modules = tuple(modules)
        self._options = options

    def on_mesh(self, mesh: DeviceMesh) -> FSDP2Strategy:
        """Shard along one dimension of the mesh, and replicate along another one, if there are two."""
        devices = Mesh.of(mesh, "prepare_model").sharding_mesh()
        return FSDP2Strategy(**{"modules": self._modules, "mesh": devices, **self._options})

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """Shard the model in place, and return it."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options = self._options
        if "mesh" not in options:
            _refuse_dtensors(model, "fsdp2")
            options = {"mesh": init_device_mesh(device.type, (get_context().get_world_size(),)), **options}
        for module in model.modules():
            if module is not model and isinstance(module, self._modules):
                fully_shard(module, **options)
        fully_shard(model, **options)
        return model


def _refuse_dtensors(model: torch.nn.Module, strategy: str) -> None:
    """Raise an error if a model that is parallelized in another way would be wrapped over all workers."""
    found = [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]
    if found:
        raise ConfigurationError(
            f"[DT-729] prepare_model(parallel_strategy={strategy!r}): expected a model of plain parameters, got "
            f"{len(found)} that are DTensors, such as {found[0]!r}, as parallelize_module creates them. Pass the mesh "
            "of all workers: prepare_model(model, mesh=mesh, parallel_strategy='fsdp2')"
        )
