"""Record Ray's messages about the deaths of actors, which ``test_deaths.py`` parses.

python -m tests.ray.record_deaths

The command ends actors in all of the ways below, with the installed version of Ray, and writes the errors of their
calls to ``deaths/<version>.json``. Names and addresses of this machine are replaced.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.support import DEADLINE_S

DEATHS = Path(__file__).with_name("deaths")
ADDRESS = "192.0.2.2"  # reserved for documentation
# Ray kills workers as soon as the machine uses 1 % of its memory.
LITTLE_MEMORY = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
NO_MEMORY_MONITOR = {"RAY_memory_monitor_refresh_ms": "0"}


class Victim:
    """An actor that ends itself, or waits to be ended."""

    def is_ready(self) -> bool:
        return True

    def end_by_signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        self.wait()

    def end_by_exit(self, code: int) -> None:
        os._exit(code)

    def wait(self) -> None:
        threading.Event().wait(DEADLINE_S)


def kill(actor: Any, cluster: Cluster) -> Any:
    call = actor.wait.remote()
    ray.kill(actor)
    return call


def remove_node(actor: Any, cluster: Cluster) -> Any:
    node = other_node(cluster)
    lost = id_of(node)
    cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + DEADLINE_S
    while any(each["Alive"] for each in ray.nodes() if each["NodeID"] == lost):  # until then, it may be unreachable
        assert time.monotonic() < deadline, "Ray has not noticed the loss of the node"
    return actor.wait.remote()


def other_node(cluster: Cluster) -> Any:
    """Return a node that is neither the head nor the driver's node."""
    own = ray.get_runtime_context().get_node_id()
    sockets = {node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] != own}
    return next(node for node in cluster.worker_nodes if node.raylet_socket_name in sockets)


def id_of(node: Any) -> str:
    """Return Ray's id of a node, which is not an attribute of the node in all versions."""
    return next(each["NodeID"] for each in ray.nodes() if each["RayletSocketName"] == node.raylet_socket_name)


CAUSES: Mapping[str, Callable[[Any, Cluster], Any]] = {
    "SIGKILL": lambda actor, cluster: actor.end_by_signal.remote(signal.SIGKILL),
    "SIGTERM": lambda actor, cluster: actor.end_by_signal.remote(signal.SIGTERM),
    "SIGSEGV": lambda actor, cluster: actor.end_by_signal.remote(signal.SIGSEGV),
    "exit code 3": lambda actor, cluster: actor.end_by_exit.remote(3),
    "ray.kill": kill,
    "memory monitor": lambda actor, cluster: actor.wait.remote(),
    "lost node": remove_node,
}
"""The ways to end an actor: each function returns the call whose error is recorded."""


@contextlib.contextmanager
def cluster_of_three_nodes(variables: Mapping[str, str]) -> Iterator[Cluster]:
    """Start a cluster with two nodes besides the head, so that one of them is not the driver's."""
    os.environ.update(variables)  # read by Ray's processes
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def record(cause: str) -> dict[str, str]:
    """End an actor, and return the type and the message of the error that ends its call."""
    is_short_of_memory = cause == "memory monitor"
    with cluster_of_three_nodes(LITTLE_MEMORY if is_short_of_memory else NO_MEMORY_MONITOR) as cluster:
        place = NodeAffinitySchedulingStrategy(id_of(other_node(cluster)), soft=False)
        actor = ray.remote(Victim).options(scheduling_strategy=place).remote()
        if not is_short_of_memory:  # the actor might be killed earlier
            ray.get(actor.is_ready.remote(), timeout=DEADLINE_S)
        try:
            ray.get(CAUSES[cause](actor, cluster), timeout=DEADLINE_S)
        except ray.exceptions.GetTimeoutError:
            raise
        except ray.exceptions.RayError as error:
            return {"error": type(error).__name__, "message": mask(str(error), ray.util.get_node_ip_address())}
        raise RuntimeError(f"{cause}: expected an error, got none")


def mask(message: str, address: str) -> str:
    """Replace this machine's address, and the commands of its processes, in a message."""
    message = message.replace(address, ADDRESS)
    return re.sub(r"^(\d+\t[\d.]+\t).*", r"\1python train.py", message, flags=re.MULTILINE)


def main() -> None:
    """Record the chosen causes, and keep the recorded messages of the others."""
    parser = argparse.ArgumentParser(prog="python -m tests.ray.record_deaths")
    parser.add_argument("causes", nargs="*", help=f"the causes to record (default: all): {', '.join(CAUSES)}")
    file = DEATHS / f"{ray.__version__}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}
    for cause in parser.parse_args().causes or CAUSES:
        recorded[cause] = record(cause)
        print(f"{cause}: {recorded[cause]}", flush=True)
    file.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
