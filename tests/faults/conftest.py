"""Prints the table of outcomes at the end, and writes it to ``$DRIVETRAIN_FAULT_TABLE``."""

import os
from pathlib import Path

import pytest

from tests.contract.conftest import pipe, runtime
from tests.faults.table import PROPERTY, Row, formatted

__all__ = ["pipe", "runtime"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        Row(*value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if rows:
        terminalreporter.section("faults: outcome, and seconds until the fault was detected")
        terminalreporter.write_line(formatted(rows))
        if file := os.environ.get("DRIVETRAIN_FAULT_TABLE"):
            Path(file).write_text(formatted(rows) + "\n")
