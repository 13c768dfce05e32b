"""Runs tests of the conformance kits on broken implementations, all of one module in one pytest process."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

from tests.support import PROCESS_LIMIT_S, ROOT

Case = tuple[str, str]
"""The name of a class of tests, and the name of one of its tests, with its parameters."""


def run_cases(
    module: str, cases: Iterable[Case], directory: Path, *, timeout_s: float = PROCESS_LIMIT_S
) -> dict[Case, str]:
    """Run tests of a module in this folder, and return the message of each test that failed.

    Args:
        module: the name of the module.
        cases: the tests.
        directory: an empty directory.
        timeout_s: seconds after which the pytest process is killed.
    """
    report = directory / "report.xml"
    nodes = [f"tests/kits/{module}.py::{kit}::{test}" for kit, test in cases]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report), *nodes]
    command += ["--basetemp", str(directory / "tests")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert report.exists(), run.stdout + run.stderr
    failures = {}
    for test in ElementTree.parse(report).iter("testcase"):
        problems = [*test.iter("failure"), *test.iter("error")]
        if problems:
            kit = test.attrib["classname"].rpartition(".")[2]
            failures[kit, test.attrib["name"]] = "\n".join(problem.text or "" for problem in problems)
    return failures
