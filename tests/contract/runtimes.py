"""The runtimes under test, their capabilities, and markers that select the runtimes which can support a scenario."""

from collections.abc import Iterator
from typing import Any

import pytest

CAPABILITIES = {
    "inprocess": {"driver", "exit status"},
    "local": {"processes", "parent", "exit status"},
    "command": {"processes", "parent", "exit status"},
    "ray": {"processes"},
}
"""The scenarios that each runtime supports.

- ``driver``: the train function runs in the driver's own process.
- ``processes``: worker processes: one that dies, several ranks, output that is separate from the driver's.
- ``parent``: the parent of a worker belongs to drivetrain. So the exit code of the worker is known, also before the
  reactions of other ranks, and its descendants are killed.
- ``exit status``: the exit status of a driver shows the signal that has ended it.
"""

_MARKS: dict[str, list[Any]] = {"ray": [pytest.mark.ray]}


def supporting(*capabilities: str) -> pytest.MarkDecorator:
    """Select the runtimes with all these capabilities."""
    return pytest.mark.parametrize("runtime", list(_runtimes(*capabilities)), indirect=True)


def _runtimes(*capabilities: str) -> Iterator[Any]:
    for name, supported in CAPABILITIES.items():
        if supported.issuperset(capabilities):
            yield pytest.param(name, id=name, marks=_MARKS.get(name, []))


ALL = list(_runtimes())

with_processes = supporting("processes")
with_parent = supporting("parent")
in_this_process = supporting("driver")

same_on_ray = pytest.mark.same_on_ray
"""Marks a scenario that runs the same code on ``ray`` as on ``command``: that of the driver, and that of a worker which
is connected over TCP and stores its own files. By default, the scenario is left out on Ray."""

driver_only = pytest.mark.driver_only
"""Marks a scenario that shows the driver, whose code is the same on all runtimes. By default, it is left out on
``command`` and on Ray."""


def once_on_ray(first: Any, *others: Any) -> list[Any]:
    """Return cases of a scenario for ``parametrize``. Those after the first are ``same_on_ray``."""
    values = [case if isinstance(case, tuple) else (case,) for case in others]
    return [first, *(pytest.param(*case, marks=same_on_ray) for case in values)]


def mostly_on(name: str) -> pytest.MarkDecorator:
    """Select all runtimes for a long scenario; all but one of them only in a campaign."""
    others = [
        pytest.param(other, id=other, marks=[pytest.mark.campaign, *_MARKS.get(other, [])])
        for other in CAPABILITIES
        if other != name
    ]
    return pytest.mark.parametrize("runtime", [name, *others], indirect=True)
