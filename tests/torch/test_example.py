"""examples/digits.py, as users start it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT


def run_example(storage_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "examples/digits.py", "--storage-path", storage_path, *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more would only get in the way of what runs beside the tests
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_example_reaches_its_accuracy_and_shows_where_the_run_is(tmp_path: Path):
    ended = run_example(tmp_path)
    assert ended.returncode == 0, ended.stderr
    (directory,) = tmp_path.iterdir()
    assert str(directory) in ended.stdout
    reports = [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]
    assert [report["epoch"] for report in reports] == list(range(1, 13))
    best = max(report["accuracy"] for report in reports)
    assert best >= 0.97
    assert re.search(r"reads ([\d.]+)%", ended.stdout)[1] == f"{best * 100:.1f}", "it evaluates the best checkpoint"
    assert 2 <= len(list(directory.glob("checkpoint_*"))) <= 3, "the best two, and the latest"


def test_example_that_stays_below_its_accuracy_fails(tmp_path: Path):
    ended = run_example(tmp_path, "--epochs", "1", "--runtime", "inprocess")
    assert ended.returncode == 1
    assert "of the test digits" in ended.stdout, ended.stderr
