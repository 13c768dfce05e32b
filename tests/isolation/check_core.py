"""The core alone in an empty environment: its import is light, and it is sufficient to train on one machine."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HEAVY = {"torch", "ray", "pandas", "pyarrow", "numpy"}


def loaded_modules(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return set(run.stdout.split())


def check_import_is_light() -> None:
    heavy = loaded_modules("import drivetrain") & HEAVY
    assert not heavy, f"import drivetrain loads {sorted(heavy)}"


def train_func(config: dict[str, int]) -> int:
    import drivetrain

    context = drivetrain.get_context()
    for step in range(config["steps"]):
        drivetrain.report({"step": step, "rank": context.get_world_rank()})
    return context.get_world_size()


def check_two_workers_report(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    result = DataParallelTrainer(
        train_func,
        train_loop_config={"steps": 3},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="isolation", storage_path=storage_path),
    ).fit()
    assert result.error is None, result.error
    result.write_report(f"{storage_path}/page.html")
    command = Path(sys.executable).with_name("drivetrain")
    listed = subprocess.run([command, "runs", "list", storage_path], check=True, stdout=subprocess.PIPE, text=True)
    assert "isolation  finished" in listed.stdout, listed.stdout
    assert result.return_value == 2, result.return_value
    assert (result.metrics["step"], result.metrics["rank"]) == (2, 0), result.metrics


def check_missing_tracker_is_reported_with_the_command_to_install_it(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, PluginNotFoundError, RunConfig, ScalingConfig

    trainer = DataParallelTrainer(
        train_func,
        train_loop_config={"steps": 1},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="tracked", storage_path=storage_path, callbacks=["tensorboard"]),
    )
    try:
        trainer.fit()
        message = "no error"
    except PluginNotFoundError as error:
        message = str(error)
    assert 'pip install "drivetrain[tensorboard]"' in message, message


def check_missing_packages_are_reported_with_the_command_to_install_them(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, DrivetrainError, RunConfig, ScalingConfig

    def message_of(trainer: DataParallelTrainer) -> str:
        try:
            trainer.fit()
        except DrivetrainError as error:
            return str(error)
        return "no error"

    run = RunConfig(storage_path=storage_path, verbose=0)
    on_ray = DataParallelTrainer(train_func, scaling_config=ScalingConfig(runtime="ray"), run_config=run)
    assert 'pip install "drivetrain[ray]"' in message_of(on_ray), message_of(on_ray)
    os.environ["RAY_ADDRESS"] = "127.0.0.1:6379"
    by_default = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=2), run_config=run)
    assert 'pip install "drivetrain[ray]"' in message_of(by_default), message_of(by_default)
    del os.environ["RAY_ADDRESS"]
    try:
        on_ray.as_trainable()
        message = "no error"
    except DrivetrainError as error:
        message = str(error)
    assert 'pip install "drivetrain[ray-tune]"' in message, message
    for name in ("torch", "torch_xla", "tensorflow", "xgboost", "lightgbm", "horovod", "jax"):
        try:
            DataParallelTrainer(train_func, backend_config=name)
            message = "no error"
        except DrivetrainError as error:
            message = str(error)
        assert f'pip install "drivetrain[{name.partition("_")[0]}]"' in message, message


def check_missing_data_package_is_reported_with_the_command_to_install_it(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, PluginNotFoundError, RunConfig, ScalingConfig

    trainer = DataParallelTrainer(
        train_func,
        datasets={"train": {"x": [1, 2, 3]}},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="data", storage_path=storage_path),
    )
    try:
        trainer.fit()
        message = "no error"
    except PluginNotFoundError as error:
        message = str(error)
    assert 'pip install "drivetrain[data]"' in message, message


def check_storage_works_without_other_packages(storage_path: str) -> None:
    """Use storage by a file URI and in fsspec's memory. Other storage reports what to install."""
    from drivetrain import ConfigurationError, DataParallelTrainer, Result, RunConfig, ScalingConfig

    for uri in (f"file://{storage_path}/by-uri", "memory://runs"):
        trainer = DataParallelTrainer(
            train_func,
            train_loop_config={"steps": 3},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="isolation", storage_path=uri, verbose=0),
        )
        trainer.fit()
        assert Result.from_path(f"{uri}/isolation").metrics["step"] == 2
    try:
        Result.from_path("s3://bucket/run")
    except ConfigurationError as error:
        message = str(error)
    else:
        message = "no error"
    assert "pip install pyarrow" in message, message
    assert not loaded_modules("import drivetrain; drivetrain.Checkpoint('/tmp')") & (HEAVY | {"fsspec"})


def check_plugin_is_generated(storage_path: str) -> None:
    command = [Path(sys.executable).with_name("drivetrain"), "new-plugin", "callback", "mine"]
    subprocess.run([*command, "--directory", storage_path], check=True, stdout=subprocess.PIPE)
    for file in ("src/drivetrain_mine/py.typed", ".github/workflows/test.yml", ".gitignore"):
        assert Path(storage_path, "drivetrain-mine", file).is_file(), file


def check_dependencies_are_complete() -> None:
    subprocess.run([sys.executable, "-m", "pip", "check"], check=True)


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_report(directory)
        check_missing_tracker_is_reported_with_the_command_to_install_it(directory)
        check_missing_packages_are_reported_with_the_command_to_install_them(directory)
        check_missing_data_package_is_reported_with_the_command_to_install_it(directory)
        check_storage_works_without_other_packages(directory)
        check_plugin_is_generated(directory)
    print("ok: drivetrain alone")
