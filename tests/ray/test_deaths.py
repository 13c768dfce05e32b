"""The causes of death that are parsed from Ray's messages.

``deaths/<version>.json`` contains the messages of that version of Ray. ``python -m tests.ray.record_deaths`` records
those of the installed version.
"""

import json
from pathlib import Path

import pytest
from ray.exceptions import ActorUnavailableError

from drivetrain import FailureKind
from drivetrain_ray._deaths import Death, explain_death, read_message
from tests.ray.record_deaths import ADDRESS, CAUSES, mask
from tests.support import ROOT
from tests.toml import tomllib

RECORDED = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).with_name("deaths").glob("*.json"))
}
CONNECTION_LOST = Death("Worker unexpectedly exits with a connection error code 2. End of file")
EXPECTED = {
    "SIGKILL": CONNECTION_LOST,
    "SIGTERM": Death("SIGTERM", FailureKind.PREEMPTION),
    "SIGSEGV": CONNECTION_LOST,
    "exit code 3": CONNECTION_LOST,
    "ray.kill": Death("it was killed by `ray.kill`"),
    "memory monitor": Death("due to the node running low on memory", FailureKind.OUT_OF_MEMORY, lost_node=True),
    "lost node": Death("its node has died", lost_node=True),
}
"""The expected deaths, each with a part of its reason."""


def test_oldest_and_newest_versions_are_recorded() -> None:
    (requirement,) = (
        one
        for one in tomllib.loads((ROOT / "packages/ray/pyproject.toml").read_text())["project"]["dependencies"]
        if one.startswith("ray>=")
    )
    (newest,) = (
        line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("ray==")
    )
    oldest = f"{requirement.removeprefix('ray>=')}.0"
    assert {"2.10.0", oldest, newest} <= RECORDED.keys(), "run: python -m tests.ray.record_deaths"


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("version", RECORDED)
def test_cause_is_parsed_from_a_recorded_message(version: str, cause: str) -> None:
    death, expected = read_message(RECORDED[version][cause]["message"]), EXPECTED[cause]

    assert death.reason.startswith("died; Ray reports: ")
    assert expected.reason in death.reason
    assert "causes" not in death.reason, "the causes that Ray only suspects are not a part of the reason"
    assert "\n" not in death.reason
    assert len(death.reason) <= 500
    assert (death.kind, death.lost_node) == (expected.kind, expected.lost_node)
    assert death.is_certain


def test_deaths_without_a_message_are_determined_by_the_type_of_the_error() -> None:
    assert explain_death(None) == Death("exited")
    unreachable = explain_death(ActorUnavailableError("RpcError: Socket closed", None))
    assert (unreachable.lost_node, unreachable.is_certain) == (True, False)


def test_recorded_messages_do_not_describe_the_machine() -> None:
    message = "Memory on the node (IP: 10.1.2.3)\nPID\tMEM(GB)\tCOMMAND\n12\t0.35\t/home/me/python secret.py"
    masked = mask(message, "10.1.2.3")
    assert masked == f"Memory on the node (IP: {ADDRESS})\nPID\tMEM(GB)\tCOMMAND\n12\t0.35\tpython train.py"
