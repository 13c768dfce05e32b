"""The conformance kit for runtimes, as tests that a plugin inherits.

A plugin author writes a class with two attributes, and pytest collects the tests::

    from drivetrain.testing import RuntimeCapability, RuntimeConformance

    class TestMyRuntime(RuntimeConformance):
        runtime = "my"  # the name of the entry point, or the class
        capabilities = {RuntimeCapability.PROCESSES, RuntimeCapability.EXIT_CODES}

The tests of a capability that is not declared are skipped, with the capability as the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Set
from typing import ClassVar

from drivetrain._runtimes.base import Runtime
from drivetrain.testing.conformance import check_overrides

__all__ = ["RuntimeCapability", "RuntimeConformance"]


class RuntimeCapability(enum.Enum):
    """A capability of a runtime that :class:`RuntimeConformance` tests if it is declared."""

    PROCESSES = "runs each rank in a separate process"
    EXIT_CODES = "reports the signal or exit code with which a process has exited"
    OUTPUT = "shows the output of rank 0, and writes the output of each rank to its log"
    STACKS = "returns the stacks of ranks that do not respond"
    REPLACES_RANKS = "replaces the processes of lost ranks while the other ranks continue"
    ELASTIC = "starts groups of different sizes within a run"
    ENDS_WITH_DRIVER = "ends all processes when the driver is killed with SIGKILL"


class RuntimeConformance:
    """Tests of a runtime. Derive a class from it, and set :attr:`runtime` and :attr:`capabilities`.

    Attributes:
        runtime: the name of an installed runtime, or a runtime class that can be imported and is called without
            arguments.
        capabilities: the capabilities that the runtime has. A declared capability must hold.
    """

    runtime: ClassVar[str | type[Runtime]]
    capabilities: ClassVar[Set[RuntimeCapability]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        runtime = getattr(cls, "runtime", None)
        if not isinstance(runtime, str) and not (isinstance(runtime, type) and issubclass(runtime, Runtime)):
            raise TypeError(f"{cls.__name__}: expected an attribute `runtime` with the name or the class of a runtime")
        check_overrides(cls, RuntimeConformance)
