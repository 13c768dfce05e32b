"""The documentation's example backend passes the conformance kit."""

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import CODE


def test_example_backend_passes_the_conformance_kit(tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "error"),
            *("--rootdir", str(CODE / "tally"), str(CODE / "tally")),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    assert " passed, 1 skipped in" in finished.stdout, "expected to skip only the test for a separate framework"
