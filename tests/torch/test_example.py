"""``examples/digits.py`` and ``examples/tensor_parallel_digits.py``, run as scripts as users do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PROCESS_LIMIT_S, ROOT


def run_example(storage_path: Path, *options: str, name: str = "digits") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", "--storage-path", storage_path, *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more threads would slow down other processes
        check=False,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
    )


def test_example_reaches_its_accuracy_and_prints_the_run_directory(tmp_path: Path):
    finished = run_example(tmp_path)
    assert finished.returncode == 0, finished.stderr
    (directory,) = tmp_path.iterdir()
    assert str(directory) in finished.stdout
    reports = [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]
    assert [report["epoch"] for report in reports] == list(range(1, 13))
    best = max(report["accuracy"] for report in reports)
    assert best >= 0.97
    printed = re.search(r"classifies ([\d.]+)%", finished.stdout)
    assert printed[1] == f"{best * 100:.1f}", "it evaluates the best checkpoint"
    assert 2 <= len(list(directory.glob("checkpoint_*"))) <= 3, "the best two and the latest are kept"


@pytest.mark.campaign
def test_example_fails_if_it_does_not_reach_its_accuracy(tmp_path: Path):
    finished = run_example(tmp_path, "--epochs", "1", "--runtime", "inprocess")
    assert finished.returncode == 1
    assert "of the test digits" in finished.stdout, finished.stderr


@pytest.mark.campaign
def test_example_with_tensor_parallelism_reaches_its_accuracy(tmp_path: Path):
    finished = run_example(tmp_path, name="tensor_parallel_digits")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (directory,) = tmp_path.iterdir()
    assert str(directory) in finished.stdout
    reports = [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]
    assert reports[-1]["accuracy"] >= 0.95
    printed = re.search(r"classifies ([\d.]+)%", finished.stdout)
    assert printed[1] == f"{reports[-1]['accuracy'] * 100:.1f}", "one process evaluates the checkpoint of four"
