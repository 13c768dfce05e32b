"""A Ray cluster of several nodes on this machine, for the duration of a job."""

import contextlib
from collections.abc import Iterator

import ray
from ray.cluster_utils import Cluster


@contextlib.contextmanager
def cluster_of(nodes: int) -> Iterator[None]:
    """Connect to a cluster with this number of nodes with one CPU each, and a node for the driver without CPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
