"""The parts of the runtimes that a scenario can have by its nature."""

import pytest

_RAY = pytest.param("ray", id="ray", marks=pytest.mark.ray)

with_processes = pytest.mark.parametrize("runtime", ["local", _RAY], indirect=True)
"""Needs worker processes: one that dies, several ranks, output that is not this process's own."""

in_this_process = pytest.mark.parametrize("runtime", ["inprocess"], indirect=True)
"""What only the driver's own process can offer."""

on_this_machine = pytest.mark.parametrize("runtime", ["local"], indirect=True)
"""Promised by the local runtime alone: what only a parent process knows, and output, which Ray forwards its own way."""
