"""Markers that select the runtimes which can support a scenario."""

import pytest

_RAY = pytest.param("ray", id="ray", marks=pytest.mark.ray)

with_processes = pytest.mark.parametrize("runtime", ["local", _RAY], indirect=True)
"""Requires worker processes: one that dies, several ranks, output that is separate from the driver's."""

in_this_process = pytest.mark.parametrize("runtime", ["inprocess"], indirect=True)
"""Only possible in the driver's own process."""

on_this_machine = pytest.mark.parametrize("runtime", ["local"], indirect=True)
"""Only guaranteed by the local runtime: knowledge of a parent process, and output, which Ray forwards differently."""
