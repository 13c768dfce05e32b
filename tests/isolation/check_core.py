"""The core alone in an empty environment: light to import, and enough to train on one machine."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HEAVY = {"torch", "ray", "pandas", "pyarrow", "numpy"}


def loaded_modules(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
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


def check_tracker_that_is_not_installed_says_what_to_install(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, PluginNotFoundError, RunConfig, ScalingConfig

    trainer = DataParallelTrainer(
        train_func,
        train_loop_config={"steps": 1},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="tracked", storage_path=storage_path, callbacks=["tensorboard"]),
    )
    try:
        trainer.fit()
        said = "nothing, and trained"
    except PluginNotFoundError as error:
        said = str(error)
    assert 'pip install "drivetrain[tensorboard]"' in said, said


def check_what_is_not_installed_says_what_to_install(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, DrivetrainError, RunConfig, ScalingConfig

    def message(trainer: DataParallelTrainer) -> str:
        try:
            trainer.fit()
        except DrivetrainError as error:
            return str(error)
        return "no error"

    run = RunConfig(storage_path=storage_path, verbose=0)
    on_ray = DataParallelTrainer(train_func, scaling_config=ScalingConfig(runtime="ray"), run_config=run)
    assert 'pip install "drivetrain[ray]"' in message(on_ray), message(on_ray)
    os.environ["RAY_ADDRESS"] = "127.0.0.1:6379"
    unnamed = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=2), run_config=run)
    assert 'pip install "drivetrain[ray]"' in message(unnamed), message(unnamed)
    del os.environ["RAY_ADDRESS"]
    try:
        on_ray.as_trainable()
        said = "no error"
    except DrivetrainError as error:
        said = str(error)
    assert 'pip install "drivetrain[ray-tune]"' in said, said
    for name in ("torch", "torch_xla", "tensorflow", "xgboost", "lightgbm", "horovod"):
        try:
            DataParallelTrainer(train_func, backend_config=name)
            said = "no error"
        except DrivetrainError as error:
            said = str(error)
        assert f'pip install "drivetrain[{name.partition("_")[0]}]"' in said, said


def check_dataset_says_what_to_install(storage_path: str) -> None:
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


def check_storages_that_need_nothing_else_work(storage_path: str) -> None:
    """Local paths by URI, and fsspec's own; others say what to install."""
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
        said = str(error)
    else:
        said = ""
    assert "pip install pyarrow" in said, said
    assert not loaded_modules("import drivetrain; drivetrain.Checkpoint('/tmp')") & (HEAVY | {"fsspec"})


def check_dependencies_are_complete() -> None:
    subprocess.run([sys.executable, "-m", "pip", "check"], check=True)


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_report(directory)
        check_tracker_that_is_not_installed_says_what_to_install(directory)
        check_what_is_not_installed_says_what_to_install(directory)
        check_dataset_says_what_to_install(directory)
        check_storages_that_need_nothing_else_work(directory)
    print("ok: drivetrain alone")
