"""`drivetrain[tune]` in an empty environment: a hyperparameter search on this machine."""

import tempfile
from typing import Any

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_import_does_not_import_optuna() -> None:
    assert not loaded_modules("import drivetrain_tune") & {"optuna", "numpy", "pandas", "ray"}


def train_func(config: dict[str, Any]) -> None:
    import drivetrain

    drivetrain.report({"loss": (config["x"] - 2) ** 2})


def check_search_finds_the_best(storage_path: str) -> None:
    from drivetrain import RunConfig
    from drivetrain_tune import TuneConfig, Tuner, grid_search

    grid = Tuner(
        train_func,
        param_space={"x": grid_search([1, 2, 3])},
        tune_config=TuneConfig(metric="loss", mode="min"),
        run_config=RunConfig(storage_path=storage_path, verbose=0),
    ).fit()
    assert grid.get_best_result().config == {"x": 2}


def check_missing_ray_tune_is_reported_with_the_command_to_install_it() -> None:
    from drivetrain import DataParallelTrainer, DrivetrainError

    try:
        DataParallelTrainer(train_func).as_trainable()
        message = "no error"
    except DrivetrainError as error:
        message = str(error)
    assert 'pip install "drivetrain[ray-tune]"' in message, message


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_import_does_not_import_optuna()
    check_missing_ray_tune_is_reported_with_the_command_to_install_it()
    with tempfile.TemporaryDirectory() as directory:
        check_search_finds_the_best(directory)
    print("ok: drivetrain[tune]")
