"""Every example plugin of the documentation passes its conformance kit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.example_plugins import EXAMPLES, install_examples

TESTED = [example for example in EXAMPLES if list(example.glob("test_*.py"))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", [pytest.param(path, id=path.name) for path in TESTED])
def test_example_plugin_passes_its_conformance_kit(example: Path, tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "error"),
            *("--rootdir", str(example), str(example)),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": install_examples([example], tmp_path / "site"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
