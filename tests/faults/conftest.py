"""The table of what was found out, which is shown at the end, and written to ``$DRIVETRAIN_FAULT_TABLE``."""

import os
from pathlib import Path

import pytest

from tests.contract.conftest import pipe, runtime
from tests.faults.table import ROWS, formatted

__all__ = ["pipe", "runtime"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("faults: how each ended, and after how many seconds it was noticed")
        terminalreporter.write_line(formatted())
        if file := os.environ.get("DRIVETRAIN_FAULT_TABLE"):
            Path(file).write_text(formatted() + "\n")
