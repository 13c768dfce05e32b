"""`drivetrain` in an empty environment: the command, the page of a run, and the lines about its progress."""

import subprocess
import sys
import tempfile
from pathlib import Path

from check_core import check_dependencies_are_complete, check_import_is_light, check_two_workers_report, message_of

COMMAND = Path(sys.executable).with_name("drivetrain")


def check_console_shows_a_run(storage_path: str) -> None:
    result = check_two_workers_report(storage_path)
    result.write_report(f"{storage_path}/page.html")
    assert "isolation" in Path(storage_path, "page.html").read_text()
    assert 'pip install "drivetrain[plot]"' in (message := message_of(result.plot)), message
    for command in ([COMMAND], [sys.executable, "-m", "drivetrain"]):
        words = [*command, "runs", "list", storage_path]
        listed = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        assert "isolation  finished" in listed.stdout, listed.stdout


def check_command_trains_and_shows_its_progress(storage_path: str) -> None:
    job = Path(storage_path, "job.py")
    job.write_text("import drivetrain\n\ndef train():\n    drivetrain.report({'loss': 0.5})\n")
    words = [COMMAND, "run", f"{job}:train", "--num-workers", "2", "--storage-path", storage_path]
    run = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "loss" in run.stdout + run.stderr, run


def check_missing_generator_is_reported_with_the_command_to_install_it() -> None:
    words = [COMMAND, "new-plugin", "callback", "mine"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run
    assert run.stderr.endswith('Run: pip install "drivetrain[testing]"\n'), run


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    with tempfile.TemporaryDirectory() as directory:
        check_console_shows_a_run(directory)
        check_command_trains_and_shows_its_progress(directory)
    check_missing_generator_is_reported_with_the_command_to_install_it()
    print("ok: drivetrain")
