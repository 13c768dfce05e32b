"""Connects to a Ray cluster, reserves resources, and determines available resources."""

from __future__ import annotations

import contextlib
import importlib
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
from drivetrain.plugin.runtimes import GroupSpec
from drivetrain_ray._worker import Devices

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from drivetrain import ScalingConfig

__all__ = ["Reservation", "bundle_of", "connect", "find_room", "note_unreachable", "reserve"]

_CONNECT_WAIT_S = 10.0
_SILENT_WAIT_S = 2.0
_POLL_S = 0.2
_NODE_LABEL = "ray.io/node-id"  # set by Ray on every node
_PLACEMENT_TRIAL_S = 1
_RELEASE_WAIT_S = 1.0
_RELEASE_POLL_S = 0.005
_UNREACHABLE_S = 30.0
_PLAIN = {"CPU", "memory"}  # resources that a process can use without a device assignment by Ray


def connect(scaling: ScalingConfig) -> None:
    """Connect to the configured cluster, or else to a running one on this machine, or else start a local cluster."""
    import ray

    # Ray imports it with the first output of a worker. After Ctrl-C, Python would refuse that with a traceback.
    importlib.import_module("concurrent.futures.thread")
    if ray.is_initialized():
        return
    configured = os.environ.get("RAY_ADDRESS")
    address = configured or _running_cluster()
    if address is None:
        requested = scaling.total_resources.get("CPU", 0)
        ray.init(
            address="local",
            num_cpus=max(len(os.sched_getaffinity(0)), math.ceil(requested)),
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
        return
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigurationError(
            f"{'RAY_ADDRESS=' if configured else 'local Ray cluster '}{address!r}: expected a running Ray cluster, "
            f"got a connection error: {error}"
        ) from error


def _running_cluster() -> str | None:
    """Return the address of the cluster that ``ray.init()`` would find on this machine; None if none is reachable.

    If a cluster was lost but its address file still exists, Ray itself would wait for minutes.
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
    """Reserved resources of the cluster: a bundle of resources for each worker.

    Attributes:
        group: the placement group that holds the resources.
        request: the bundles and avoided nodes that were requested; a group with an equal request can reuse the
            reservation.
        devices: a mapping from the index of a bundle to the devices that Ray assigned to the actor in this bundle.
        first_bundle: the index of the first worker's bundle.
        is_foreign: True if the placement group belongs to other code, so it is not released here.
        reusable: True if the next group of the run may use the reservation.
    """

    group: PlacementGroup
    request: Any
    devices: dict[int, Devices] = field(default_factory=dict)
    first_bundle: int = 0
    is_foreign: bool = False
    reusable: bool = True

    def require(self, workers: int, scaling: ScalingConfig) -> None:
        """Check that there is a bundle for each worker.

        Raises:
            ResourceError: there are too few bundles, or they are too small.
        """
        required = bundle_of(scaling)
        bundles = self.group.bundle_specs[self.first_bundle : self.first_bundle + workers]
        if len(bundles) < workers or any(
            bundle.get(name, 0) < amount for bundle in bundles for name, amount in required.items()
        ):
            raise ResourceError(
                f"placement group: expected {workers} bundles with {required} for the workers, starting at bundle "
                f"{self.first_bundle}, got {list(self.group.bundle_specs)}. Reserve more resources, or use fewer "
                "workers or smaller resources_per_worker"
            )

    def nodes(self) -> dict[int, str]:
        """Return the node of each bundle, by the index of the bundle."""
        import ray

        nodes: dict[int, str] = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return nodes

    def is_intact(self) -> bool:
        """Return True if all nodes of the reservation are alive."""
        import ray

        alive = _alive_nodes()
        table = ray.util.placement_group_table(self.group)
        # The table is empty if the cluster was restarted after the reservation.
        return table.get("state") == "CREATED" and alive >= set(table["bundles_to_node_id"].values())

    def accepts_spare(self, bundle: int) -> bool:
        """Return True if a spare can use this bundle: its devices are known, or it has none.

        Ray itself assigns no devices to a spare.
        """
        return bundle in self.devices or set(self.group.bundle_specs[bundle]) <= _PLAIN

    def release(self) -> None:
        """Release the resources, unless they belong to other code. Ray releases them in the background."""
        import ray

        if ray.is_initialized() and not self.is_foreign:
            _release(self.group)


def bundle_of(scaling: ScalingConfig) -> dict[str, float]:
    """Return the resources that one worker requests from Ray."""
    worker = {"CPU": 1.0, **({"GPU": 1.0} if scaling.use_gpu else {}), **(scaling.resources_per_worker or {})}
    if scaling.accelerator_type:
        worker[f"accelerator_type:{scaling.accelerator_type}"] = 0.001
    return {name: amount for name, amount in worker.items() if amount}


def find_room(scaling: ScalingConfig, running: Sequence[str], avoided: frozenset[str]) -> int:
    """Return the number of workers that a run could have now, determined by trial reservations.

    Args:
        scaling: the scaling configuration of the run.
        running: the node of each running worker.
        avoided: nodes to avoid as long as there are other nodes.
    """
    import ray

    labels = _labels_for_more(running, scaling.placement_strategy, avoided)
    if labels is None:
        return len(running)
    bundle = bundle_of(scaling)

    def count(resources: Mapping[str, float]) -> int:
        """Return the number of workers for which the resources suffice, regardless of the nodes that have them."""
        more = math.floor(min((resources.get(name, 0.0) / each for name, each in bundle.items()), default=0.0) + 1e-9)
        return min(scaling.max_workers, len(running) + more)

    def fits(number: int) -> bool:
        await_release(time.monotonic() + _RELEASE_WAIT_S)
        group = _request_bundles(
            [dict(bundle) for _ in range(number - len(running))], scaling.placement_strategy, labels
        )
        try:
            return bool(group.wait(_PLACEMENT_TRIAL_S))
        finally:
            _release(group)

    possible, too_many = len(running), scaling.max_workers + 1
    # Resources that were just released may not be listed as available yet. So without running workers, the first
    # estimate uses all resources of the cluster.
    for resources in (ray.available_resources,) if running else (_reachable_resources, ray.available_resources):
        number = min(count(resources()), too_many - 1)
        if number <= possible or fits(number):
            return max(possible, number)
        too_many = number
    while (number := (possible + too_many) // 2) > possible:
        if fits(number):
            possible = number
        else:
            too_many = number
    return possible


def _labels_for_more(running: Sequence[str], strategy: str, avoided: frozenset[str]) -> list[dict[str, str]] | None:
    """Return the label selectors for further bundles, given the nodes of running workers; None if no node is left."""
    if not running or not strategy.startswith("STRICT_"):
        return _selectors(avoided)
    if strategy == "STRICT_PACK":
        return [{_NODE_LABEL: running[0]}]
    excluded = avoided.union(running)
    return _selectors(excluded) if _alive_nodes() - excluded else None


_unreachable: dict[str, float] = {}  # for each node, the time at which it was found unreachable


def note_unreachable(node: str) -> None:
    """Note that a node is unreachable. Its resources are ignored for a while, until Ray itself notices the loss."""
    _unreachable[node] = time.monotonic()


def _unreachable_nodes() -> set[str]:
    since = time.monotonic() - _UNREACHABLE_S
    return {node for node, noted_at in _unreachable.items() if noted_at > since}


def _reachable_resources() -> Mapping[str, float]:
    import ray

    lost = _unreachable_nodes()
    resources = (Counter(node["Resources"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] not in lost)
    return sum(resources, Counter())


def _alive_nodes() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _request_bundles(bundles: list[dict[str, float]], strategy: str, labels: list[dict[str, str]]) -> PlacementGroup:
    """Request bundles from Ray, each on a node that matches the label selector, if there is one."""
    import ray

    options = {"bundle_label_selector": labels * len(bundles)} if labels else {}
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=strategy, **options)
    return group


def reserve(spec: GroupSpec, deadline: float, kept: Reservation | None) -> Reservation:
    """Reserve the workers' resources. If this takes long, print that the driver waits for resources.

    Args:
        spec: the group that needs the resources.
        deadline: the value of ``time.monotonic()`` at which to give up.
        kept: an earlier reservation of the run, which is reused if it matches, and released otherwise.

    Raises:
        ConfigurationError: a worker requests no resources.
        ResourceError: the resources did not become available in time.
    """
    scaling = spec.scaling
    bundle = bundle_of(scaling)
    bundles = [dict(bundle) for _ in range(spec.num_workers)]
    trainer = {name: amount for name, amount in (scaling.trainer_resources or {}).items() if amount}
    if trainer:
        bundles.append(trainer)
    if not bundle:
        raise ConfigurationError(
            "[DT-101] ScalingConfig(resources_per_worker=...): expected an amount above 0 of at least one resource for "
            "each "
            "worker on Ray, got none"
        )
    request = bundles, spec.avoided
    if kept is not None:
        if kept.request == request and kept.is_intact():
            return kept
        kept.release()
    await_release(deadline)
    group = _request_bundles(bundles, scaling.placement_strategy, _selectors(spec.avoided))
    reserved = threading.Event()

    def wait() -> None:
        # Ray's wait cannot be interrupted and takes whole seconds. A thread keeps the main thread free for Ctrl-C.
        with contextlib.suppress(Exception):  # the group may be removed during the wait
            if group.wait(math.ceil(max(0.0, deadline - time.monotonic()))):
                reserved.set()

    try:
        threading.Thread(target=wait, name="drivetrain-reserve", daemon=True).start()
        if reserved.wait(min(_SILENT_WAIT_S, max(0.0, deadline - time.monotonic()))):
            return Reservation(group, request)
        requested = f"{spec.num_workers} x {bundle}" + (f" and {trainer} for the trainer" if trainer else "")
        message = f"waiting for resources on the Ray cluster: requested {requested}; {_inventory()}"
        spec.output.console.print(message, error=True)
        while not reserved.wait(max(0.0, min(_POLL_S, deadline - time.monotonic()))):
            spec.interrupts.act()
            if time.monotonic() < deadline:
                continue
            raise ResourceError(
                f"[DT-303] Ray cluster: expected free resources within {spec.start_timeout_s:g} s "
                f"(RunConfig.start_timeout_s), got a timeout: requested {requested} "
                f"({_strategy(scaling.placement_strategy)}); {_inventory()}. "
                "Request less, or add nodes"
            )
    except BaseException:
        _release(group)
        raise
    return Reservation(group, request)


def _selectors(avoided: frozenset[str]) -> list[dict[str, str]]:
    """Return the label selectors that keep bundles off avoided nodes; an empty list if unnecessary or impossible."""
    alive = _alive_nodes()
    if not avoided & alive or alive <= avoided:
        return []
    return [{_NODE_LABEL: f"!in({','.join(sorted(avoided & alive))})"}]


def _strategy(name: str) -> str:
    """Return the name of a placement strategy, with an explanation if it restricts the nodes."""
    rule = {"STRICT_PACK": ": all on one node", "STRICT_SPREAD": ": each on a separate node"}.get(name, "")
    return name + rule


_released: set[str] = set()  # released placement groups whose resources may not be free yet


def _release(group: PlacementGroup) -> None:
    import ray

    nodes = ray.util.placement_group_table(group).get("bundles_to_node_id", {})
    if not _unreachable_nodes().intersection(nodes.values()):
        _released.add(group.id.hex())
    ray.util.remove_placement_group(group)


def await_release(deadline: float) -> None:
    """Wait until released resources are free, because Ray retries a premature reservation only after 0.5 s.

    Ray lists the resources of a placement group under names that contain the id of the group. It removes these names
    within about 50 ms after the release.
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
    """Return a description of the cluster's total and free resources."""
    import ray

    free = ray.available_resources()
    total = ray.cluster_resources()
    shown = sorted(
        name for name in total if not name.startswith(("node:", "memory", "object_store")) and "_group_" not in name
    )
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    parts = ", ".join(f"{name} {total[name]:g} ({free.get(name, 0):g} free)" for name in shown)
    return f"the cluster has {nodes} nodes with {parts or 'no resources'}"
