"""A silent script that hangs, and a script with a mistake, both run with `drivetrain run`, end with a useful error.

The error of a hang says which functions show that a script makes progress, and a script that calls one of them is not
ended. A mistake that fails the same way again is not retried as often as --max-failures allows.
"""

import subprocess
import sys
from pathlib import Path

SILENT = """
import threading

threading.Event().wait(600)
"""
WITH_HEARTBEATS = """
import threading

import drivetrain

for step in range(100):
    drivetrain.heartbeat()
    threading.Event().wait(0.1)
print("done")
"""
WITH_A_MISTAKE = """
steps = number_of_steps
"""


def run(name: str, source: str, *options: str) -> tuple[int, str, str]:
    Path(name).write_text(source)
    command = [sys.executable, "-m", "drivetrain", "run", name, "--num-workers", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout, done.stderr


def problems() -> list[str]:
    found = []
    code, output, error = run("silent.py", SILENT, "--hang-timeout", "5")
    if code != 1 or "call drivetrain.report() or drivetrain.heartbeat() in each step" not in error:
        found.append(f"silent script: exit code {code}\n{output}\n{error}")
    code, output, error = run("heartbeats.py", WITH_HEARTBEATS, "--hang-timeout", "5")
    if code != 0 or "done" not in output:
        found.append(f"script with heartbeats: exit code {code}\n{output}\n{error}")
    code, output, error = run("mistake.py", WITH_A_MISTAKE, "--max-failures", "5")
    attempts = error.count("2 workers")
    if code != 1 or attempts != 2 or "not retried again" not in error:
        found.append(f"script with a mistake: exit code {code}\n{output}\n{error}")
    return found


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or "OK")
    sys.exit(bool(found))
