"""The conformance kit for commands, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain.testing import CommandConformance

    class TestMyCommand(CommandConformance):
        name = "tidy"  # its entry point in drivetrain.commands

        def make_arguments(self, run):
            return [str(run), "--dry-run"]

A test that cannot pass for a command must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from drivetrain.testing.conformance import check_overrides

__all__ = ["CommandConformance"]


class CommandConformance:
    """Tests of a command. Derive a class from it, set :attr:`name`, and define :meth:`make_arguments` if necessary.

    Attributes:
        name: the name of its entry point in ``drivetrain.commands``, which is the name of the command.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        check_overrides(cls, CommandConformance)

    def make_arguments(self, run: Path) -> Sequence[str]:
        """Return arguments with which the command succeeds. By default, there are none.

        Args:
            run: the directory of a finished run with a checkpoint.
        """
        return ()
