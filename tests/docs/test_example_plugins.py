"""Every example plugin of the documentation passes its conformance kit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.example_plugins import EXAMPLES, install_examples
from tests.docs.test_pages import run_script

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


def test_runtime_that_cannot_replace_single_processes_replaces_all(tmp_path: Path) -> None:
    script = tmp_path / "lose_a_rank.py"
    script.write_text(_LOSES_A_RANK)
    plugins = install_examples([example for example in EXAMPLES if example.name == "subprocess"], tmp_path / "site")
    assert run_script(script, tmp_path, environment={"PYTHONPATH": plugins}).splitlines()[-1] == "1"


_LOSES_A_RANK = """
import contextlib, os, signal
import drivetrain

class Keeping(drivetrain.plugin.Backend):
    survives_losses = True

    def session(self, context, rendezvous):
        return contextlib.nullcontext()

    def rejoin(self, group, lost):
        raise AssertionError("the runtime has no new processes")

def train_func():
    attempt = drivetrain.get_context().attempt
    if attempt == 0 and drivetrain.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt

if __name__ == "__main__":
    trainer = drivetrain.DataParallelTrainer(
        train_func,
        backend_config=Keeping(),
        scaling_config=drivetrain.ScalingConfig(num_workers=2, runtime="subprocess"),
        run_config=drivetrain.RunConfig(failure_config=drivetrain.FailureConfig(max_failures=1)),
    )
    print(trainer.fit().return_value)
"""
