"""The examples, started in the same way as by users."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PROCESS_LIMIT_S, ROOT


def run_example(name: str, storage_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", "--storage-path", storage_path, *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epochs"),
    [
        ("tensorflow_digits", 5),
        ("tensorflow_regression", 10),
        pytest.param("tensorflow_autoencoder", 6, marks=pytest.mark.campaign),
    ],
)
def test_example_reaches_its_goal_and_prints_the_run_directory(name: str, epochs: int, tmp_path: Path):
    completed = run_example(name, tmp_path)
    assert completed.returncode == 0, completed.stderr
    (directory,) = tmp_path.iterdir()
    assert str(directory) in completed.stdout
    assert len((directory / "result.json").read_text().splitlines()) == epochs
    assert list(directory.glob("checkpoint_*"))


@pytest.mark.campaign
def test_example_that_misses_its_goal_fails(tmp_path: Path):
    completed = run_example("tensorflow_regression", tmp_path, "--epochs", "1", "--runtime", "inprocess")
    assert completed.returncode == 1
    assert "of the variance" in completed.stdout, completed.stderr
