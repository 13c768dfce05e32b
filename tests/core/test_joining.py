"""The output of a worker that joins a run without logs, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import DEADLINE_S

WORKER = """
import json, sys
from pathlib import Path
from drivetrain._wire.commands import JoinRun
from drivetrain._worker.joining import join_run
from drivetrain._worker.output import WorkerOutput

given = json.loads(sys.argv[1])
messages = []
output = WorkerOutput(messages.append)
for run in range(2):
    logs = Path(given["logs"]) if given["logs"] else None
    join_run(JoinRun(0, log_directory=logs, shown=given["shown"]), output)
    print("run", run)
    output.flush()
Path(given["sent"]).write_bytes(b"".join(data for _, data in messages))
"""


@pytest.mark.parametrize(
    ("logs", "shown", "sent", "left"),
    [
        (None, True, "run 0\nrun 1\n", ""),
        (None, False, "", ""),
        ("no/run/logs", True, "run 0\nrun 1\n", ""),
        ("no/run/logs", False, "", "run 0\nrun 1\n"),  # it would be lost otherwise
    ],
)
def test_worker_without_logs_sends_the_output_that_is_shown(
    tmp_path: Path, logs: str | None, shown: bool, sent: str, left: str
) -> None:
    given = {"logs": logs and str(tmp_path / logs), "shown": shown, "sent": str(tmp_path / "sent")}
    worker = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(given)],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert worker.returncode == 0, worker.stderr
    assert (tmp_path / "sent").read_text() == sent
    assert worker.stdout == left
