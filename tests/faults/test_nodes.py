"""Ray nodes that leave and join during a run; at every moment with ``DRIVETRAIN_FAULTS=all``."""

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.scenarios import STEPS, VICTIM, Moment
from tests.faults.table import PROPERTY, Row
from tests.support import run_with_new_cluster

SCRIPT = "tests.faults.node_scenarios"
NODE_S = 10.0
ALL = os.environ.get("DRIVETRAIN_FAULTS") == "all"
KILLED = list(Moment) if ALL else [Moment.MIDST, Moment.RESTART]
ADDED = list(Moment) if ALL else [Moment.MIDST]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1900)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """The results of a driver that performed its runs one after another on a cluster of three nodes."""
    turns = itertools.zip_longest(KILLED, ADDED)  # so that there are always enough nodes
    cells = [
        (fault, moment.value)
        for turn in turns
        for fault, moment in zip(("node killed", "node added"), turn, strict=True)
        if moment is not None
    ]
    directory = tmp_path_factory.mktemp("nodes")
    rows, _ = run_with_new_cluster(
        SCRIPT, str(directory), json.dumps(cells), directory=directory, timeout_s=300 + 90 * len(cells)
    )
    return {(row["fault"], row["moment"]): row for row in rows}


@pytest.mark.parametrize("moment", KILLED, ids=lambda moment: moment.value)
def test_run_continues_elsewhere_when_a_node_is_lost(
    results: dict[tuple[str, str], Any], moment: Moment, record_property: Callable[[str, object], None]
) -> None:
    row = results["node killed", moment.value]
    *_, (kind, rank, message) = row["failures"]
    record_property(PROPERTY, [*Row("node killed", moment.value, "ray", "recovers", kind, row["noticed_s"], message)])

    assert row["error"] == ""
    assert len(row["failures"]) == 1 + (moment is Moment.RESTART)
    assert (kind, rank) == ("infrastructure", VICTIM)
    assert f"rank {VICTIM}" in message
    assert "node" in message
    assert row["noticed_s"] < NODE_S
    assert row["resumed_at"] == moment.committed
    check_the_rest(row)


@pytest.mark.parametrize("moment", ADDED, ids=lambda moment: moment.value)
def test_added_node_does_not_disturb_the_run(
    results: dict[tuple[str, str], Any], moment: Moment, record_property: Callable[[str, object], None]
) -> None:
    row = results["node added", moment.value]
    record_property(PROPERTY, [*Row("node added", moment.value, "ray", "continues", "", None, "")])

    assert row["error"] == ""
    assert len(row["failures"]) == (moment is Moment.RESTART)
    check_the_rest(row)


def check_the_rest(row: dict[str, Any]) -> None:
    assert row["steps"] == list(range(STEPS))
    assert row["left"] == []
    assert row["groups"] == ["REMOVED"]
    assert not row["lock"]
