"""`drivetrain-core` in an empty environment: a light import, a quiet training, and hints for all that is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain import Result

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


def check_two_workers_report(storage_path: str, **options: Any) -> Result:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig, runs

    result = DataParallelTrainer(
        train_func,
        train_loop_config={"steps": 3},
        scaling_config=ScalingConfig(num_workers=2, **options),
        run_config=RunConfig(name="isolation", storage_path=storage_path),
    ).fit()
    assert result.error is None, result.error
    assert result.return_value == 2, result.return_value
    assert (result.metrics["step"], result.metrics["rank"]) == (2, 0), result.metrics
    (run,) = runs.list_runs(storage_path)
    assert run.record().status == "finished", run.record()
    assert run.columns(rank=1)["step"] == [0, 1, 2], run.columns(rank=1)
    return result


def check_training_is_quiet(storage_path: str) -> None:
    job = f"import check_core; check_core.check_two_workers_report({storage_path!r})"
    command = [sys.executable, "-W", "error", "-c", job]
    run = subprocess.run(command, cwd=os.path.dirname(__file__), capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", ""), run


def message_of(function: Callable[[], object]) -> str:
    """Return the message of the error that a function raises."""
    from drivetrain import DrivetrainError

    try:
        function()
    except (AttributeError, DrivetrainError, ImportError) as error:
        return str(error)
    return "no error"


def check_missing_console_is_reported_with_the_command_to_install_it(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, Result, RunConfig, ScalingConfig

    command = subprocess.run([sys.executable, "-m", "drivetrain"], capture_output=True, text=True, check=False)
    assert command.returncode == 1, command
    assert command.stderr.endswith("Run: pip install drivetrain\n"), command

    result = Result.from_path(f"{storage_path}/isolation")
    message = message_of(lambda: result.write_report(f"{storage_path}/page.html"))
    assert message.endswith("Run: pip install drivetrain"), message
    message = message_of(result.plot)
    assert message.endswith('Run: pip install "drivetrain[plot]"'), message
    for options, run in (
        ({"runtime": "command"}, RunConfig(storage_path=storage_path)),
        ({"num_workers": 0}, RunConfig(storage_path=storage_path, callbacks=["progress"])),
    ):
        trainer = DataParallelTrainer(train_func, scaling_config=ScalingConfig(**options), run_config=run)
        message = message_of(trainer.fit)
        expected = '"drivetrain[launch]"' if "runtime" in options else "drivetrain"
        assert message.endswith(f"Run: pip install {expected}"), message


def check_names_of_other_packages_are_reported_with_their_import() -> None:
    import drivetrain

    for name, package in (
        ("Trainer", "interactive"),
        ("save_checkpoint", "interactive"),
        ("world_rank", "interactive"),
        ("CommandRuntime", "launch"),
        ("TorchTrainer", "torch"),
    ):
        for message in (
            message_of(lambda name=name: getattr(drivetrain, name)),
            message_of(lambda name=name: exec(f"from drivetrain import {name}")),
        ):
            assert message.endswith(f"Write: from drivetrain_{package} import {name}"), message
    for name, package in (("TrackerCallback", "track"), ("ProgressCallback", "console")):
        message = message_of(lambda name=name: getattr(drivetrain.loggers, name))
        assert message.endswith(f"Write: from drivetrain_{package} import {name}"), message
    assert "from drivetrain_testing import" in message_of(lambda: drivetrain.testing)


def check_missing_tracker_is_reported_with_the_command_to_install_it(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    trainer = DataParallelTrainer(
        train_func,
        train_loop_config={"steps": 1},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="tracked", storage_path=storage_path, callbacks=["tensorboard"]),
    )
    message = message_of(trainer.fit)
    assert 'pip install "drivetrain[tensorboard]"' in message, message


def check_missing_packages_are_reported_with_the_command_to_install_them(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    run = RunConfig(storage_path=storage_path, verbose=0)
    on_ray = DataParallelTrainer(train_func, scaling_config=ScalingConfig(runtime="ray"), run_config=run)
    assert 'pip install "drivetrain[ray]"' in (message := message_of(on_ray.fit)), message
    os.environ["RAY_ADDRESS"] = "127.0.0.1:6379"
    by_default = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=2), run_config=run)
    assert 'pip install "drivetrain[ray]"' in (message := message_of(by_default.fit)), message
    del os.environ["RAY_ADDRESS"]
    assert 'pip install "drivetrain[ray-tune]"' in (message := message_of(on_ray.as_trainable)), message
    for name in ("torch", "torch_xla", "tensorflow", "xgboost", "lightgbm", "horovod", "jax"):
        message = message_of(lambda name=name: DataParallelTrainer(train_func, backend_config=name))
        assert f'pip install "drivetrain[{name.partition("_")[0]}]"' in message, message


def check_missing_data_package_is_reported_with_the_command_to_install_it(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    trainer = DataParallelTrainer(
        train_func,
        datasets={"train": {"x": [1, 2, 3]}},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="data", storage_path=storage_path),
    )
    assert 'pip install "drivetrain[data]"' in (message := message_of(trainer.fit)), message


def check_storage_works_without_other_packages(storage_path: str) -> None:
    """Use storage by a file URI and in fsspec's memory. Other storage reports what to install."""
    from drivetrain import DataParallelTrainer, Result, RunConfig, ScalingConfig

    for uri in (f"file://{storage_path}/by-uri", "memory://runs"):
        trainer = DataParallelTrainer(
            train_func,
            train_loop_config={"steps": 3},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="isolation", storage_path=uri, verbose=0),
        )
        trainer.fit()
        assert Result.from_path(f"{uri}/isolation").metrics["step"] == 2
    message = message_of(lambda: Result.from_path("s3://bucket/run"))
    assert "pip install pyarrow" in message, message
    assert not loaded_modules("import drivetrain; drivetrain.Checkpoint('/tmp')") & (HEAVY | {"fsspec"})


def check_dependencies_are_complete() -> None:
    subprocess.run([sys.executable, "-m", "pip", "check"], check=True)


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    with tempfile.TemporaryDirectory() as directory:
        check_training_is_quiet(directory)
        check_missing_console_is_reported_with_the_command_to_install_it(directory)
        check_missing_tracker_is_reported_with_the_command_to_install_it(directory)
        check_missing_packages_are_reported_with_the_command_to_install_them(directory)
        check_missing_data_package_is_reported_with_the_command_to_install_it(directory)
        check_storage_works_without_other_packages(directory)
    check_names_of_other_packages_are_reported_with_their_import()
    print("ok: drivetrain-core")
