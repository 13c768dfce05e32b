"""A Ray cluster of one node, until the benchmark ends it."""

import signal

from ray.cluster_utils import Cluster
from stamps import options, stamp

if __name__ == "__main__":
    config = options(cpus=2)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": config["cpus"], "include_dashboard": False})
    stamp(config, "ready", address=cluster.address)
    signal.pause()
