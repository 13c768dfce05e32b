"""The cluster: connecting to it, reserving a share of it, and what it has."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, ResourceError
from drivetrain.plugin import GroupSpec
from drivetrain_ray._worker import Devices

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from drivetrain import ScalingConfig

__all__ = ["Reservation", "bundle_of", "connect", "find_room", "note_unreachable", "reserve"]

_CONNECT_WAIT_S = 10.0
_QUIET_WAIT_S = 2.0
_LOOK_S = 0.2
_NODE_LABEL = "ray.io/node-id"  # which Ray gives every node
_TRIAL_S = 1
_RELEASE_WAIT_S = 1.0
_RELEASE_POLL_S = 0.005
_UNREACHABLE_S = 30.0
_PLAIN = {"CPU", "memory"}  # what a process can be given without Ray


def connect(scaling: ScalingConfig) -> None:
    """Connects to the cluster that is configured or runs here, or starts one in this machine's size."""
    import ray

    if ray.is_initialized():
        return
    configured = os.environ.get("RAY_ADDRESS")
    address = configured or _running_cluster()
    if address is None:
        wanted = scaling.total_resources.get("CPU", 0)
        ray.init(
            address="local",
            num_cpus=max(len(os.sched_getaffinity(0)), math.ceil(wanted)),
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
        return
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigurationError(
            f"{'RAY_ADDRESS' if configured else 'the Ray cluster here'}={address!r}: expected a running Ray cluster, "
            f"found none: {error}"
        ) from error


def _running_cluster() -> str | None:
    """The cluster that ``ray.init()`` would find on this machine, if it answers.

    Ray itself waits for minutes for one that has died and left its address behind.
    """
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        address = Path(temporary, "ray", "ray_current_cluster").read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_CONNECT_WAIT_S):
            return address
    except (OSError, ValueError):
        return None


@dataclass(slots=True)
class Reservation:
    """A share of the cluster: a bundle of resources for each worker.

    Attributes:
        group: what holds it.
        asked: what it was made for; of use for a group that asks for the same.
        devices: by bundle, what Ray gave the process that it started there.
        first: the bundle of the first worker.
        borrowed: it belongs to another program, so it is not released.
        reusable: the next group of the run may use it.
    """

    group: PlacementGroup
    asked: Any
    devices: dict[int, Devices] = field(default_factory=dict)
    first: int = 0
    borrowed: bool = False
    reusable: bool = True

    def require(self, workers: int, scaling: ScalingConfig) -> None:
        """Makes sure that there is a bundle for each worker.

        Raises:
            ResourceError: there are too few, or too small ones.
        """
        bundle = bundle_of(scaling)
        given = self.group.bundle_specs[self.first : self.first + workers]
        if len(given) < workers or any(found.get(name, 0) < each for found in given for name, each in bundle.items()):
            raise ResourceError(
                f"{workers} workers with {bundle} each want as many bundles of the placement group that they were "
                f"given, got {list(self.group.bundle_specs)}, the workers' being those from number {self.first} on: "
                "reserve more, or ask for less"
            )

    def nodes(self) -> dict[int, str]:
        """The node of each bundle."""
        import ray

        placed: dict[int, str] = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return placed

    def is_whole(self) -> bool:
        """Whether all of its nodes are there."""
        import ray

        alive = _alive_nodes()
        table = ray.util.placement_group_table(self.group)
        # A cluster that was started since knows nothing of it.
        return table.get("state") == "CREATED" and alive >= set(table["bundles_to_node_id"].values())

    def has_room_for_spares(self, bundle: int) -> bool:
        """Whether it is known what a process that Ray has not started in a bundle is to use."""
        return bundle in self.devices or set(self.group.bundle_specs[bundle]) <= _PLAIN

    def release(self) -> None:
        """Gives it back, which Ray does in the background."""
        import ray

        if ray.is_initialized() and not self.borrowed:
            _release(self.group)


def bundle_of(scaling: ScalingConfig) -> dict[str, float]:
    """What one worker asks Ray for."""
    worker = {"CPU": 1.0, **({"GPU": 1.0} if scaling.use_gpu else {}), **(scaling.resources_per_worker or {})}
    if scaling.accelerator_type:
        worker[f"accelerator_type:{scaling.accelerator_type}"] = 0.001
    return {name: amount for name, amount in worker.items() if amount}


def find_room(scaling: ScalingConfig, running: Sequence[str], avoided: frozenset[str]) -> int:
    """How many workers a run could have now, found by having Ray try.

    Args:
        scaling: the run's.
        running: the node of each worker that runs already.
        avoided: nodes that are to have none, as long as there are others.
    """
    import ray

    labels = _labels_beside(running, scaling.placement_strategy, avoided)
    if labels is None:
        return len(running)
    bundle = bundle_of(scaling)

    def count(resources: Mapping[str, float]) -> int:
        """How many would be as much as that, wherever it is."""
        more = math.floor(min((resources.get(name, 0.0) / each for name, each in bundle.items()), default=0.0) + 1e-9)
        return min(scaling.max_workers, len(running) + more)

    def fits(number: int) -> bool:
        await_release(time.monotonic() + _RELEASE_WAIT_S)
        group = _ask_for([dict(bundle) for _ in range(number - len(running))], scaling.placement_strategy, labels)
        try:
            return bool(group.wait(_TRIAL_S))
        finally:
            _release(group)

    found, too_many = len(running), scaling.max_workers + 1
    # What was just given back may not be listed as free yet: without workers, all that there is comes first.
    for resources in (ray.available_resources,) if running else (_reachable_resources, ray.available_resources):
        number = min(count(resources()), too_many - 1)
        if number <= found or fits(number):
            return max(found, number)
        too_many = number
    while (number := (found + too_many) // 2) > found:
        if fits(number):
            found = number
        else:
            too_many = number
    return found


def _labels_beside(running: Sequence[str], strategy: str, avoided: frozenset[str]) -> list[dict[str, str]] | None:
    """What keeps further bundles where they may be, given the nodes of those that run; None for nowhere."""
    if not running or not strategy.startswith("STRICT_"):
        return _selectors(avoided)
    if strategy == "STRICT_PACK":
        return [{_NODE_LABEL: running[0]}]
    taken = avoided.union(running)
    return _selectors(taken) if _alive_nodes() - taken else None


_unreachable: dict[str, float] = {}  # nodes, and since when


def note_unreachable(node: str) -> None:
    """Has a node be counted out for a while: Ray takes a quarter of a minute to find that it is gone."""
    _unreachable[node] = time.monotonic()


def _unreachable_nodes() -> set[str]:
    since = time.monotonic() - _UNREACHABLE_S
    return {node for node, when in _unreachable.items() if when > since}


def _reachable_resources() -> Mapping[str, float]:
    import ray

    lost = _unreachable_nodes()
    found = (Counter(node["Resources"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] not in lost)
    return sum(found, Counter())


def _alive_nodes() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _ask_for(bundles: list[dict[str, float]], strategy: str, labels: list[dict[str, str]]) -> PlacementGroup:
    """Asks Ray to reserve bundles, each on a node with the label, if there is one."""
    import ray

    options = {"bundle_label_selector": labels * len(bundles)} if labels else {}
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=strategy, **options)
    return group


def reserve(spec: GroupSpec, deadline: float, kept: Reservation | None) -> Reservation:
    """Reserves the workers' resources; says what it waits for, and gives up in time.

    Args:
        spec: the group that wants them.
        deadline: when to give up, by the monotonic clock.
        kept: an earlier reservation of the run, which is used again if it serves, and otherwise given back.
    """
    scaling = spec.scaling
    bundle = bundle_of(scaling)
    bundles = [dict(bundle) for _ in range(spec.num_workers)]
    trainer = {name: amount for name, amount in (scaling.trainer_resources or {}).items() if amount}
    if trainer:
        bundles.append(trainer)
    if not bundle:
        raise ConfigurationError("a worker on Ray: expected at least a fraction of one resource, found none asked for")
    asked = bundles, spec.avoided
    if kept is not None:
        if kept.asked == asked and kept.is_whole():
            return kept
        kept.release()
    await_release(deadline)
    group = _ask_for(bundles, scaling.placement_strategy, _selectors(spec.avoided))
    reserved = threading.Event()

    def wait() -> None:
        # Ray's wait cannot be interrupted and takes whole seconds; on a thread it leaves Ctrl-C to the main one.
        with contextlib.suppress(Exception):  # the group may be removed meanwhile
            if group.wait(math.ceil(max(0.0, deadline - time.monotonic()))):
                reserved.set()

    try:
        threading.Thread(target=wait, name="drivetrain-reserve", daemon=True).start()
        if reserved.wait(min(_QUIET_WAIT_S, max(0.0, deadline - time.monotonic()))):
            return Reservation(group, asked)
        wanted = f"{spec.num_workers} x {bundle}" + (f" and {trainer} for the trainer" if trainer else "")
        message = f"waiting for resources on the Ray cluster: asked for {wanted}; {_inventory()}"
        spec.output.console.print(message, error=True)
        while not reserved.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            spec.interrupts.act()
            if time.monotonic() < deadline:
                continue
            raise ResourceError(
                f"waited {spec.start_timeout_s:g} s (RunConfig.start_timeout_s) for resources on the Ray cluster: "
                f"asked for {wanted} ({_strategy(scaling.placement_strategy)}); {_inventory()}: "
                "ask for less, or add nodes"
            )
    except BaseException:
        _release(group)
        raise
    return Reservation(group, asked)


def _selectors(avoided: frozenset[str]) -> list[dict[str, str]]:
    """What keeps a bundle off nodes; nothing where there are no others."""
    alive = _alive_nodes()
    if not avoided & alive or alive <= avoided:
        return []
    return [{_NODE_LABEL: f"!in({','.join(sorted(avoided & alive))})"}]


def _strategy(name: str) -> str:
    """A placement strategy, with its rule where it has one."""
    rule = {"STRICT_PACK": ": all on one node", "STRICT_SPREAD": ": each on a node of its own"}.get(name, "")
    return name + rule


_released: set[str] = set()  # placement groups of this process whose resources may not be free yet


def _release(group: PlacementGroup) -> None:
    import ray

    nodes = ray.util.placement_group_table(group).get("bundles_to_node_id", {})
    if not _unreachable_nodes().intersection(nodes.values()):
        _released.add(group.id.hex())
    ray.util.remove_placement_group(group)


def await_release(deadline: float) -> None:
    """Waits until what was given back is free: Ray would try a reservation that comes too early again only 0.5 s later.

    A group's share of the cluster is listed as resources with its id in their names, which takes Ray 50 ms to end.
    """
    import ray

    deadline = min(deadline, time.monotonic() + _RELEASE_WAIT_S)
    while _released and time.monotonic() < deadline:
        names = list(ray.cluster_resources())
        _released.intersection_update(id_ for id_ in tuple(_released) if any(id_ in name for name in names))
        if _released:
            time.sleep(_RELEASE_POLL_S)
    _released.clear()


def _inventory() -> str:
    """What the cluster has, and what of it is free."""
    import ray

    free = ray.available_resources()
    total = ray.cluster_resources()
    shown = sorted(
        name for name in total if not name.startswith(("node:", "memory", "object_store")) and "_group_" not in name
    )
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    parts = ", ".join(f"{name} {total[name]:g} ({free.get(name, 0):g} free)" for name in shown)
    return f"the cluster's {nodes} nodes have {parts or 'nothing'}"
