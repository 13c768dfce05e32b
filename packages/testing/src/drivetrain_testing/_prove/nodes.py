"""The nodes of a Ray cluster, for kills of whole nodes: those of a running cluster, or of one that is started for them.

All nodes are on this machine: each is a process ``raylet`` with its workers. This module imports Ray only in functions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain import ConfigurationError
from drivetrain_testing._leftovers import exits
from drivetrain_testing._marked import kill

__all__ = ["Nodes", "ray_nodes"]

_NODES = 2
_CPUS = 64
"""The number of CPUs that each started node claims to have, so that any number of workers fits."""

_EXIT_S = 10.0
_TEMPORARY = "RAY_TMPDIR"
_HEAD = "node:__internal_head__"  # the resource that marks the head node


class Nodes:
    """The nodes of a Ray cluster.

    Args:
        address: the address of the cluster.
        started: the cluster, if it was started for the kills; None for a cluster that was there before.
    """

    def __init__(self, address: str, started: Any) -> None:
        self.address = address
        self._started = started

    @property
    def scaling(self) -> dict[str, Any]:
        """Settings of ``ScalingConfig`` for the runs on this cluster."""
        return {} if self._started is None else {"placement_strategy": "SPREAD"}  # ranks on more than one node

    def check(self) -> None:
        """Check that the cluster outlives the loss of a node.

        Raises:
            ConfigurationError: it has one node, or no node that can be killed from here.
        """
        alive = self._alive()
        if len(alive) < 2:
            raise ConfigurationError(
                f"kill: expected a Ray cluster of two or more nodes for the kill of a node, got {len(alive)} at "
                f"{self.address}. Unset RAY_ADDRESS, and prove starts a cluster of several nodes on this machine"
            )
        if not any(_HEAD not in node["Resources"] and _process_of(node) is not None for node in alive.values()):
            raise ConfigurationError(
                f"kill: expected a node of the Ray cluster at {self.address} that runs on this machine and is not its "
                "head node, got none. Unset RAY_ADDRESS, and prove starts a cluster of several nodes on this machine"
            )

    def has(self, node_id: str) -> bool:
        """Return True if the cluster has a node with this ID."""
        return node_id in self._alive()

    def kill(self, node_id: str) -> None:
        """Kill a node by SIGKILL. A cluster that was started for the kills gets another node before.

        Raises:
            ConfigurationError: it is the head node, without which the cluster ends, or runs on another machine.
        """
        node = self._alive()[node_id]
        process = _process_of(node)
        if _HEAD in node["Resources"] or process is None:
            raise ConfigurationError(
                f"kill: expected a rank on a node that can be killed, got one on node {node_id:.8}, which is the head "
                "node or runs on another machine. Start the head node with --num-cpus=0, and nodes on this machine"
            )
        if self._started is not None:
            self._started.add_node(num_cpus=_CPUS)
        kill(process)
        exits(process, _EXIT_S)

    def _alive(self) -> dict[str, Mapping[str, Any]]:
        import ray

        connects = not ray.is_initialized()
        if connects:  # only for a moment, or else Ray would print the end of the log of each killed node
            ray.init(address=self.address, logging_level=logging.ERROR, log_to_driver=False)
        try:
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            return {node["NodeID"]: node for node in nodes if node["Alive"]}
        finally:
            if connects:
                ray.shutdown()


@contextlib.contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """Return the Ray cluster of this process, or of ``RAY_ADDRESS``. Without these, start one with several nodes.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster is unsuitable.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            'kill: expected Ray for the kill of a node. Run: pip install "drivetrain[ray]"'
        ) from error
    with contextlib.ExitStack() as stack:
        started = None
        address = os.environ.get("RAY_ADDRESS")
        if ray.is_initialized():
            address = ray.get_runtime_context().gcs_address
        elif address is None:
            started = stack.enter_context(_new_cluster())
            address = started.address
        nodes = Nodes(str(address), started)
        nodes.check()
        yield nodes


@contextlib.contextmanager
def _new_cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    # A directory of its own, or else other programs on this machine would find and join this cluster. Its path is
    # short, because the names of sockets are limited.
    directory = tempfile.mkdtemp(prefix="prove-", dir="/tmp")
    before = os.environ.get(_TEMPORARY)
    os.environ[_TEMPORARY] = directory
    Path(directory, "ray").mkdir()
    try:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(_NODES):
                cluster.add_node(num_cpus=_CPUS)
            yield cluster
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]
    finally:
        del os.environ[_TEMPORARY]
        os.environ.update({} if before is None else {_TEMPORARY: before})
        shutil.rmtree(directory, ignore_errors=True)


def _process_of(node: Mapping[str, Any]) -> int | None:
    """Return the process id of a node's raylet; None if it does not run on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has exited
            continue
        is_raylet = os.path.basename(arguments[0]) == "raylet"
        if is_raylet and any(each.endswith(f"={node['RayletSocketName']}") for each in arguments):
            return int(path.parent.name)
    return None
