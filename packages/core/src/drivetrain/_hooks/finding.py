"""The findings of ``drivetrain doctor``. Runtimes and backends return findings from their ``diagnose()`` methods."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "run_python"]

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Finding:
    """The result of one check of ``drivetrain doctor``.

    Attributes:
        name: a short name of the checked thing.
        status: ``"ok"``, ``"warning"`` or ``"problem"``.
        found: a description of the result.
        advice: how to fix the problem; empty if there is nothing to fix.
    """

    name: str
    status: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def run_python(code: str, *arguments: str) -> str:
    """Run code in a new Python process, so that its imports do not affect this process.

    Args:
        code: Python source.
        arguments: the values of ``sys.argv[1:]``.

    Returns:
        The process's output to stdout, followed by stderr if the process failed; ``"nothing"`` without output. A
        process that still runs after 20 seconds is killed, and the return value is a message about the timeout.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no response within {_TIMEOUT_S:g} s"
    return (process.stdout if process.returncode == 0 else process.stdout + process.stderr).strip() or "nothing"
