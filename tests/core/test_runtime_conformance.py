"""The conformance kit for runtimes, applied to the runtimes of the core, and the kit's own rules."""

from typing import Any

import pytest

from drivetrain.testing import RuntimeCapability, RuntimeConformance


class TestLocal(RuntimeConformance):
    runtime = "local"
    capabilities = frozenset(RuntimeCapability)


class TestInProcess(RuntimeConformance):
    runtime = "inprocess"


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
