"""Implements the checks of ``drivetrain doctor`` for Ray."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Iterator
from typing import Literal

from drivetrain.plugin.backends import Finding, run_python

__all__ = ["diagnose"]

_CONNECT_S = 5.0
_DESCRIBE_CLUSTER = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
alive = [node for node in ray.nodes() if node["Alive"]]
print("CLUSTER", len(alive), json.dumps(ray.cluster_resources()))
"""


def diagnose(address: str | None) -> Iterator[Finding]:
    """Check whether Ray is installed, and whether the cluster is reachable.

    Args:
        address: the address of a cluster; None to check no cluster.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        status: Literal["ok", "problem"] = "ok" if address is None else "problem"
        yield Finding("Ray", status, "is not installed", 'pip install "drivetrain[ray]"')
        return
    if address is None:
        yield Finding("Ray", "ok", f"{version}; no cluster address is set (RAY_ADDRESS or --address ray=...)")
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():  # Ray itself takes half a minute to report an unreachable address
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            advice = "start the cluster (ray start --head), correct the address, or open the port"
            yield Finding("Ray", "problem", f"{address} is unreachable ({error})", advice)
            return
    output = run_python(_DESCRIBE_CLUSTER, address)
    described = next((line for line in output.splitlines() if line.startswith("CLUSTER")), "")
    if described:
        _, nodes, resources = described.split(" ", 2)
        yield Finding("Ray", "ok", f"{address}: {nodes} nodes, {resources}")
    else:
        advice = (
            "start the cluster (ray start --head), correct the address, open its ports, or use the same versions of "
            "Ray and Python as the cluster"
        )
        yield Finding("Ray", "problem", f"{address} is unreachable with Ray {version}: {output[-300:]}", advice)
