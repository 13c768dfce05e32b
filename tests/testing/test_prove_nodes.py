"""``drivetrain prove`` with kills of nodes of a Ray cluster, and the notes in the timeline of the killed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from drivetrain_testing._prove.proof import prove_command
from tests.support import ROOT
from tests.testing.node_proofs import PROOFS
from tests.testing.test_prove import SCRIPTS

_MARKS = dict.fromkeys(("killed_node_is_replaced", "cluster_of_the_process"), pytest.mark.campaign)


@pytest.mark.ray
@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, [])) for name in PROOFS])
def test_nodes_are_killed(tmp_path: Path, name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.testing.node_proofs", name, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=450,
    )
    assert finished.returncode == 0, finished.stdout


def test_kill_of_a_node_is_refused_with_another_runtime_or_a_change_of_workers() -> None:
    command = [sys.executable, str(SCRIPTS / "right_plain.py")]
    with pytest.raises(ConfigurationError, match=r"--runtime ray for the kill of a node, got 'local'"):
        prove_command(command, victims=["node"], runtime="local")
    with pytest.raises(ConfigurationError, match=r"only the driver with resize"):
        prove_command(command, victims=["node"], resize=3)
    with pytest.raises(ConfigurationError, match=r"expected some of rank, driver and node"):
        prove_command(command, victims=[])
