"""The ported programs, by framework."""

from tests.ports.programs import boosting, frames, pytorch

PORTS = (*pytorch.PORTS, *frames.PORTS, *boosting.PORTS)
