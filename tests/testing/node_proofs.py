"""Kills of nodes of Ray clusters by ``prove``, each in a process: ``python -m tests.testing.node_proofs NAME DIR``.

The process of the tests may be connected to a cluster already.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from drivetrain.runs import open_run
from drivetrain_testing import prove
from drivetrain_testing._prove.proof import prove_command
from tests.testing.test_prove import SCRIPTS, make_trainer


def killed_node_is_replaced(directory: Path) -> None:
    keep = directory / "kept"
    command = [sys.executable, str(SCRIPTS / "right_plain.py")]
    proof = prove_command(command, kills=2, victims=["node", "rank"], runtime="ray", keep=keep)

    assert proof.equal, proof
    assert "the node of rank" in proof.kills[0]
    assert "the node of" not in proof.kills[1]
    run = open_run(keep / "disturbed" / "runs" / "run")
    failures = [each["failure"] for each in run.timeline() if each["event"] == "AttemptFailed"]
    assert "node" in failures[0]["summary"]
    notes = [each["text"] for each in run.record().history.notes]
    assert notes == [*(f"killed {kill}" for kill in proof.kills), proof.verdict]


def cluster_of_one_node(directory: Path) -> None:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    with pytest.raises(ConfigurationError, match=r"two or more nodes for the kill of a node, got 1"):
        prove(make_trainer(broken=False), victims=["node"])


def cluster_of_the_process(directory: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        proof = prove(make_trainer(broken=False), kills=1, victims=["node"])
        alive = [node for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()
        cluster.shutdown()

    assert proof.equal, proof
    assert "the node of rank 0" in proof.kills[0]
    assert len(alive) == 2  # the head node and one other


PROOFS = {each.__name__: each for each in (killed_node_is_replaced, cluster_of_one_node, cluster_of_the_process)}

if __name__ == "__main__":
    PROOFS[sys.argv[1]](Path(sys.argv[2]))
