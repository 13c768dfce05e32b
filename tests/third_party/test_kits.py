"""The installed plugins pass the conformance kits, which their authors would run."""

import os
import subprocess
import sys
from pathlib import Path

KITS = Path(__file__).with_name("kits.py")


def test_plugins_pass_the_kits_of_their_hooks(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path]
    run = subprocess.run(
        [*command, KITS],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    assert run.returncode == 0, run.stdout
