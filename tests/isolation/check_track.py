"""`drivetrain[tensorboard]` in an empty environment: trackers are found by name, and write what is reported."""

import tempfile
from pathlib import Path

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules, train_func


def check_import_loads_no_tracker() -> None:
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


def check_another_tracker_says_what_to_install() -> None:
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
    check_import_loads_no_tracker()
    check_another_tracker_says_what_to_install()
    with tempfile.TemporaryDirectory() as directory:
        check_run_has_an_event_file(directory)
    print("ok: drivetrain[tensorboard]")
