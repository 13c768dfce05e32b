"""`drivetrain[launch]` in an empty environment: a command starts the workers."""

import os
import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, check_two_workers_report, loaded_modules


def check_command_starts_two_workers(storage_path: str) -> None:
    from drivetrain_launch import CommandRuntime

    check_two_workers_report(f"{storage_path}/object", runtime=CommandRuntime("env {worker}", host="127.0.0.1"))
    os.environ |= {"DRIVETRAIN_COMMAND": "env {worker}"}
    check_two_workers_report(f"{storage_path}/name", runtime="command")


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    assert "drivetrain_launch" not in loaded_modules("import drivetrain; drivetrain.DataParallelTrainer(print)")
    with tempfile.TemporaryDirectory() as directory:
        check_command_starts_two_workers(directory)
    print("ok: drivetrain[launch]")
