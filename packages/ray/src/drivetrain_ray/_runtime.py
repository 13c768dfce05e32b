"""The ``ray`` runtime. Importing this module does not import Ray."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from drivetrain import PluginNotFoundError
from drivetrain.plugin import Runtime
from drivetrain_ray._references import reduce_reference

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from drivetrain import ScalingConfig
    from drivetrain.plugin import WorkerInfo
    from drivetrain.plugin.backends import Finding
    from drivetrain.plugin.runtimes import GroupSpec
    from drivetrain_ray._actors import Actors
    from drivetrain_ray._cluster import Reservation
    from drivetrain_ray._group import RayGroup

__all__ = ["RayRuntime"]


class RayRuntime(Runtime):
    """Starts workers on a Ray cluster.

    Args:
        placement_group: a placement group whose resources the workers use; None to reserve resources for each run.
        first_bundle: the index of the first worker's bundle in the placement group.
    """

    name = "ray"

    def __init__(self, placement_group: PlacementGroup | None = None, first_bundle: int = 0) -> None:
        self._actors: WeakKeyDictionary[contextlib.ExitStack, Actors] = WeakKeyDictionary()
        self._reservation: Reservation | None = None
        if placement_group is not None:
            from drivetrain_ray._cluster import Reservation

            self._reservation = Reservation(placement_group, None, first_bundle=first_bundle, is_foreign=True)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the placement group, which only the driver that reserved it can use."""
        return type(self), ()

    @classmethod
    def detect(cls) -> bool:
        """Return True if a cluster is connected, or configured with ``RAY_ADDRESS``."""
        if os.environ.get("RAY_ADDRESS"):
            return True
        ray = sys.modules.get("ray")
        return bool(ray is not None and ray.is_initialized())

    @classmethod
    def diagnose(cls, address: str | None) -> Iterable[Finding]:
        """Run the checks of ``drivetrain doctor``: whether Ray is installed, and whether a cluster is reachable."""
        from drivetrain_ray._diagnosis import diagnose

        return diagnose(address)

    def reduce(self, value: Any) -> Any:
        """Reduce object references as Ray's own pickler does: the result includes the owner of the object.

        Without the owner, a worker would wait forever for the object.
        """
        return reduce_reference(value)

    def validate(self, scaling: ScalingConfig) -> None:
        """Check that Ray is installed, and that a given placement group has enough bundles."""
        try:
            importlib.import_module("ray")
        except ModuleNotFoundError:
            raise PluginNotFoundError(
                '[DT-601] the "ray" runtime requires Ray, which is not installed. Run: pip install "drivetrain[ray]"'
            ) from None
        if self._reservation is not None:
            self._reservation.require(scaling.max_workers, scaling)

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Return the maximum number of workers that Ray could place now, including the running ones."""
        from drivetrain_ray._cluster import connect, find_room

        connect(scaling)
        return find_room(scaling, [worker.node_id for worker in running], avoided)

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[RayGroup]:
        """Reserve resources and start the actors; on exit, terminate the actors."""
        from drivetrain_ray._actors import Actors
        from drivetrain_ray._cluster import connect
        from drivetrain_ray._group import launch_group

        connect(spec.scaling)
        spec.interrupts.replace_handlers_of("ray")
        actors = self._actors.get(spec.run_resources)
        if actors is None:
            import ray

            expected = spec.scaling.max_workers + spec.scaling.spare_workers
            actors = self._actors[spec.run_resources] = Actors(ray.util.get_node_ip_address(), expected, spec.ports)
            spec.run_resources.callback(actors.close)
        with launch_group(spec, actors, self._reservation) as group:
            yield group
