"""`drivetrain[tensorboard]` in an empty environment: trackers are found by name, and write the reported metrics."""

import tempfile
from pathlib import Path

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules, train_func


def check_import_does_not_load_a_tracker() -> None:
    assert not loaded_modules("import drivetrain_track; drivetrain_track.TBXLoggerCallback") & {"tensorboard", "numpy"}


def check_run_has_an_event_file(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    result = DataParallelTrainer(
        train_func,
        train_loop_config={"steps": 3},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="tracked", storage_path=storage_path, callbacks=["tensorboard"]),
    ).fit()
    assert list(Path(result.path).glob("events.out.tfevents.*"))


def check_missing_tracker_is_reported_with_the_command_to_install_it() -> None:
    from drivetrain import PluginNotFoundError
    from drivetrain_track import MLflowLoggerCallback

    try:
        MLflowLoggerCallback()
        message = "no error"
    except PluginNotFoundError as error:
        message = str(error)
    assert 'pip install "drivetrain[mlflow]"' in message, message


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_import_does_not_load_a_tracker()
    check_missing_tracker_is_reported_with_the_command_to_install_it()
    with tempfile.TemporaryDirectory() as directory:
        check_run_has_an_event_file(directory)
    print("ok: drivetrain[tensorboard]")
