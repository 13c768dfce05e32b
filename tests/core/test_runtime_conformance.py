"""The conformance kit for runtimes, applied to the runtimes of the core, and the kit's own rules."""

from collections.abc import Mapping
from typing import Any

import pytest

from drivetrain_testing import RuntimeCapability, RuntimeConformance


class TestLocal(RuntimeConformance):
    runtime = "local"
    capabilities = frozenset(RuntimeCapability)


class TestInProcess(RuntimeConformance):
    runtime = "inprocess"


class TestCommand(RuntimeConformance):
    runtime = "command"
    capabilities = frozenset(RuntimeCapability) - {RuntimeCapability.ELASTIC}

    @pytest.fixture(autouse=True)
    def template(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DRIVETRAIN_COMMAND", "{worker}")

    def driver_environment(self) -> Mapping[str, str]:
        return {"DRIVETRAIN_COMMAND": "{worker}"}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "expected an attribute `runtime`"),
        ({"runtime": object()}, "expected an attribute `runtime`"),
        ({"runtime": "local", "capabilities": {"processes"}}, "expected RuntimeCapability, got 'processes'"),
    ],
)
def test_class_with_wrong_attributes_is_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("TestNothing", (RuntimeConformance,), attributes)
