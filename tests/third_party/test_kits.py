"""The plugins of the current version pass the conformance kits, which their authors would run.

The plugins of earlier versions must work, but do not have to pass the checks that were added to the kits later.
"""

import os
import subprocess
import sys
from pathlib import Path

from drivetrain import __version__
from tests.third_party.wheels import install, wheels_of

KITS = Path(__file__).with_name("kits.py")


def test_plugins_pass_the_kits_of_their_hooks(tmp_path: Path) -> None:
    install(wheels_of(__version__), tmp_path / "site")

    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, KITS],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )

    assert run.returncode == 0, run.stdout
