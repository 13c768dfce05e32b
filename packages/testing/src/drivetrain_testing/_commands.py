"""The conformance kit for commands, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain_testing import CommandConformance

    class TestMyCommand(CommandConformance):
        name = "tidy"  # its entry point in drivetrain.commands

        def make_arguments(self, run):
            return [str(run), "--dry-run"]

A test that cannot pass for a command must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from drivetrain.plugin import load_plugin
from drivetrain.plugin.checks import one_line
from drivetrain_console import BAD, OK, main
from drivetrain_testing._checks import check_equal, find_heavy_imports
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._retriedjob import run_two_workers

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
        """Return arguments with which the command can be run; its exit code must be 0 or 1. By default, there are none.

        Args:
            run: the directory of a finished run with a checkpoint.
        """
        return ()

    def test_adds_one_command_with_its_name_and_a_summary(self) -> None:
        parser = argparse.ArgumentParser(add_help=False)
        commands = parser.add_subparsers(metavar="COMMAND")
        try:
            load_plugin("command", self.name)(commands)
        except Exception as error:  # of the plugin
            pytest.fail(f"expected that the function adds the command {self.name!r}, got {one_line(error)}")
        summary = parser.format_help().partition("arguments:")[2].split()[2:]  # after COMMAND and the name
        assert summary, (
            f"expected a summary of {self.name!r} in the list of commands, got none. Pass it to add_command()"
        )

    def test_shows_its_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main([self.name, "--help"])
        check_equal("the exit code of --help", ended.value.code, 0)
        assert f"drivetrain {self.name}" in capsys.readouterr().out, "expected the usage of the command"

    def test_returns_an_exit_code(self, tmp_path: Path) -> None:
        self._run(tmp_path)

    def test_prints_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status = self._run(tmp_path, "--json")
        printed = capsys.readouterr()
        text = printed.out if status == OK or printed.out else printed.err
        try:
            json.loads(text)
        except ValueError:
            pytest.fail(f"expected JSON on stdout with --json, got {text[:500]!r}. Print results with emit()")

    def test_is_added_without_heavy_imports(self) -> None:
        imported = find_heavy_imports("command", self.name)  # loading a command adds it to a parser
        assert imported == "imported:", (
            f"expected that adding the command imports no framework, got {imported}. Import them in the handler"
        )

    def _run(self, directory: Path, *options: str) -> int:
        run_two_workers(directory / "runs")
        arguments = [self.name, *self.make_arguments(directory / "runs" / "run"), *options]
        try:
            status: object = main(arguments)
        except SystemExit as error:
            pytest.fail(f"drivetrain {' '.join(arguments)}: expected that the arguments are accepted, got {error!r}")
        except Exception as error:  # of the plugin
            pytest.fail(f"drivetrain {' '.join(arguments)}: expected an exit code, got {one_line(error)}")
        assert type(status) is int, f"drivetrain {' '.join(arguments)}: expected an exit code, got {status!r}"
        assert status in (OK, BAD), f"drivetrain {' '.join(arguments)}: expected the exit code 0 or 1, got {status}"
        return status
