"""The device mesh on which a model is trained: the meaning of its dimensions, and the part of the data of each rank.

``prepare_model``, ``prepare_data_loader`` and ``TrainState`` take one mesh of all workers. The data is split along its
data, replicate and shard dimensions. Ranks that differ only in the other dimensions read the same rows, and draw the
same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from drivetrain import ConfigurationError, get_context
from drivetrain.plugin.datasets import DataPosition, data_position, mesh_kinds
from drivetrain.plugin.state import random_states, restore_random_states

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mesh", "mesh_of"]

_meshes: WeakKeyDictionary[Any, Mesh] = WeakKeyDictionary()
"""The meshes of the models and data loaders that were prepared for one."""


@dataclass(frozen=True)
class Mesh:
    """A device mesh of all workers.

    Attributes:
        devices: the device mesh.
        kinds: the names of its dimensions by their kind, in the order of the mesh; see
            :func:`drivetrain.plugin.datasets.mesh_kinds`.
    """

    devices: DeviceMesh
    kinds: dict[str, str]

    @classmethod
    def of(cls, devices: DeviceMesh, where: str) -> Mesh:
        """Check a device mesh.

        Args:
            devices: the device mesh.
            where: the function that takes it, for the error message.

        Raises:
            ConfigurationError: it is no mesh of all workers, or a dimension has no name or an unknown one.
        """
        problem = f"[DT-727] {where}(mesh=...)"
        given: Any = devices
        if not all(hasattr(given, name) for name in ("mesh_dim_names", "get_coordinate")):
            raise ConfigurationError(
                f"{problem}: expected a torch.distributed.device_mesh.DeviceMesh, got {given!r:.200}. Create one with "
                "init_device_mesh"
            )
        kinds = mesh_kinds(devices.mesh_dim_names, problem)
        workers = get_context().get_world_size()
        if devices.size() != workers:
            raise ConfigurationError(
                f"{problem}: expected a mesh of all {workers} workers, got one of {devices.size()} with the dimensions "
                f"{', '.join(kinds.values())}. Pass the whole mesh, not one of its dimensions"
            )
        return cls(devices, kinds)

    @property
    def data_position(self) -> DataPosition:
        """The part of the data that this rank reads."""
        return data_position(self.kinds, self.devices.mesh.shape, list(self._coordinates.values()))

    @property
    def averaged(self) -> list[str]:
        """The names of the dimensions over which gradients are averaged.

        They include the context dimension, whose ranks have the whole model, and parts of the same sequences.
        """
        return [name for kind, name in self.kinds.items() if kind not in ("tensor", "pipeline")]

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline: 1 if every position in the data has the whole model."""
        return self.size_of(self.kinds["pipeline"]) if "pipeline" in self.kinds else 1

    @property
    def stage(self) -> int:
        """The stage of this rank, from 0."""
        return self._coordinates.get("pipeline", 0)

    @property
    def is_first_of_stage(self) -> bool:
        """True for one rank of each stage, which saves the values that are the same on all of them."""
        return not any(coordinate for kind, coordinate in self._coordinates.items() if kind != "pipeline")

    @property
    def _coordinates(self) -> dict[str, int]:
        coordinates = self.devices.get_coordinate()
        assert coordinates is not None
        return dict(zip(self.kinds, coordinates, strict=True))

    def size_of(self, name: str) -> int:
        """Return the size of a dimension."""
        return self.devices.size(list(self.kinds.values()).index(name))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. Every rank must call this method."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.devices.size()
        dist.all_gather_object(values, value)
        return values

    def averaging_group(self) -> torch.distributed.ProcessGroup:
        """Create the group of the ranks whose gradients are averaged. Every rank must call this method."""
        import torch.distributed as dist

        names = list(self.kinds.values())
        inner = [names.index(name) for name in self.averaged]
        outer = [number for number in range(len(names)) if number not in inner]
        size = math.prod(self.devices.mesh.shape[number] for number in inner)
        groups = self.devices.mesh.permute([*outer, *inner]).reshape(-1, size).tolist()
        create: Any = dist.new_subgroups_by_enumeration
        own: dist.ProcessGroup = create(groups)[0]
        return own

    def sharding_mesh(self) -> DeviceMesh:
        """Return the part of the mesh for strategies that shard parameters.

        Parameters are sharded along its last dimension: the shard dimension or, without one, the data dimension. They
        are replicated along a dimension before it.

        Raises:
            ConfigurationError: there is no such dimension, or no such order.
        """
        along = self.kinds.get("shard", self.kinds.get("data"))
        names = [name for name in self.averaged if name == along or self.size_of(name) > 1]
        if along is None or names[-1] != along or len(names) > 2:
            raise ConfigurationError(
                "[DT-729] prepare_model(mesh=...): expected a dimension to shard the parameters along ('fsdp', 'shard' "
                "or 'dp_shard', otherwise 'dp' or 'data'), and before it at most one dimension to replicate them along "
                f"('replicate', 'dp_replicate' or 'cp', or 'dp' with a shard dimension), got the dimensions "
                f"{', '.join(self.kinds.values())}. Create the mesh with other names or in another order"
            )
        return self.devices[tuple(names)]

    def align_random_states(self) -> None:
        """Continue with the random states of the first rank with this position in the data. Every rank must call it.

        Then dropout and the augmentation of rows are the same on all ranks that compute with the same activations.
        """
        own, parts = self.data_position
        if parts < self.devices.size():
            states = self.gather((own, random_states()))
            restore_random_states(next(state for part, state in states if part == own))

    def remember_for(self, value: Any) -> None:
        """Make :func:`mesh_of` return this mesh for a model or a data loader."""
        _meshes[value] = self


def mesh_of(values: Iterable[Any]) -> Mesh | None:
    """Return the mesh of the first model or data loader that was prepared for one; None if there is none."""
    return next((_meshes[value] for value in values if value in _meshes), None)
