"""The examples, as users start them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


def run_example(name: str, storage_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", "--storage-path", storage_path, *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epochs"), [("tensorflow_digits", 5), ("tensorflow_regression", 10), ("tensorflow_autoencoder", 6)]
)
def test_example_reaches_what_it_promises_and_shows_where_the_run_is(name: str, epochs: int, tmp_path: Path):
    ended = run_example(name, tmp_path)
    assert ended.returncode == 0, ended.stderr
    (directory,) = tmp_path.iterdir()
    assert str(directory) in ended.stdout
    assert len((directory / "result.json").read_text().splitlines()) == epochs
    assert list(directory.glob("checkpoint_*"))


def test_example_that_does_not_reach_it_fails_in_one_process_too(tmp_path: Path):
    ended = run_example("tensorflow_regression", tmp_path, "--epochs", "1", "--runtime", "inprocess")
    assert ended.returncode == 1
    assert "of the variance" in ended.stdout, ended.stderr
