"""The causes of death that are parsed from Ray's messages.

``deaths/<version>.json`` has messages recorded from that version of Ray, each with the expected result. To record
another version, kill actors in the same ways and copy the text of the error that their last call raises.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from drivetrain import FailureKind
from drivetrain_ray._deaths import Death, explain_death, read_message

RECORDED = sorted(Path(__file__).with_name("deaths").glob("*.json"))


@pytest.mark.parametrize(
    ("version", "cause", "recorded"),
    [
        pytest.param(file.stem, cause, recorded, id=f"{file.stem}-{cause}")
        for file in RECORDED
        for cause, recorded in json.loads(file.read_text()).items()
    ],
)
def test_cause_is_parsed_from_a_recorded_message(version: str, cause: str, recorded: dict[str, Any]) -> None:
    death = read_message(recorded["message"])

    assert death.reason.startswith(recorded["reason"])
    assert "\n" not in death.reason
    assert len(death.reason) <= 500
    assert (death.kind, death.lost_node) == (FailureKind[recorded["kind"]], recorded["lost_node"])
    assert death.is_certain


def test_deaths_without_a_message_are_determined_by_the_type_of_the_error() -> None:
    assert explain_death(None) == Death("exited")
    unreachable = explain_death(ActorUnavailableError("RpcError: Socket closed", None))
    assert (unreachable.lost_node, unreachable.is_certain) == (True, False)
