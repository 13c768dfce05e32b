"""Settings of Ray Train: those that have no effect are named with their replacement, and positions are kept."""

import os
from typing import Any

import pytest

from drivetrain import (
    CheckpointConfig,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from drivetrain._base.metrics import find_metric
from drivetrain._driver.notices import print_once, unused_variables
from drivetrain._runtimes.local import LocalRuntime

CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({"RAY_STORAGE": "/s"}, {}, "RAY_STORAGE has no effect; set DRIVETRAIN_STORAGE_PATH or RunConfig"),
        ({"RAY_STORAGE": "/s", "DRIVETRAIN_STORAGE_PATH": "/d"}, {}, ""),
        ({"RAY_STORAGE": "/s"}, {"storage_path": "/d"}, ""),
        ({"RAY_CHDIR_TO_TRIAL_DIR": "1"}, {}, r"set RunConfig\(chdir_to_trial_dir=True\)"),
        ({"RAY_CHDIR_TO_TRIAL_DIR": "0"}, {}, ""),
        ({"RAY_CHDIR_TO_TRIAL_DIR": "1"}, {"chdir_to_trial_dir": True}, ""),
        ({"TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS": "1"}, {}, "detailed_metrics=True"),
        ({"RAY_TRAIN_SOMETHING_NEW": "5"}, {}, "Migrating from Ray Train"),
        ({"RAY_TRAIN_V2_ENABLED": "1", "RAY_ADDRESS": "auto", "TRAIN_DATA": "/data"}, {}, ""),
    ],
)
def test_variable_without_effect_is_named_with_its_replacement(
    environment: dict[str, str], options: dict[str, Any], expected: str
) -> None:
    notices = list(unused_variables(RunConfig(**options), environment))
    assert len(notices) == bool(expected)
    for notice in notices:
        with pytest.raises(ValueError, match=expected):
            raise ValueError(notice)


def test_notice_is_printed_once() -> None:
    shown: list[str] = []
    for _ in range(2):
        print_once(["a notice of this test", "another notice of this test"], shown.append)
    assert shown == ["a notice of this test", "another notice of this test"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_workers": 100 * CPUS}, []),
        ({"resources_per_worker": {"CPU": 1.0}}, []),
        ({"resources_per_worker": {"memory": 5, "magic": 1}}, ["resources_per_worker['memory'], resources_per_worker"]),
        ({"accelerator_type": "A100"}, ["accelerator_type"]),
        ({"trainer_resources": {"CPU": 1}, "placement_strategy": "SPREAD"}, ["trainer_resources, placement_strategy="]),
        ({"resources_per_worker": {"CPU": CPUS}, "num_workers": (1, 2)}, [f"request {2 * CPUS} CPUs, but share"]),
    ],
)
def test_local_runtime_says_what_it_ignores(options: dict[str, Any], expected: list[str]) -> None:
    notices = LocalRuntime().ignored_settings(ScalingConfig(**options))
    assert len(notices) == len(expected)
    assert all(text in notice for text, notice in zip(expected, notices, strict=True))


def test_local_runtime_says_that_workers_leave_gpus_idle() -> None:
    (notice,) = LocalRuntime(gpus=["0", "1"]).ignored_settings(ScalingConfig(num_workers=2))
    assert "this machine has GPUs (0, 1). To use them, set use_gpu=True" in notice
    assert LocalRuntime(gpus=["0", "1"]).ignored_settings(ScalingConfig(num_workers=2, use_gpu=True)) == []


def test_configurations_accept_the_positions_of_ray_train() -> None:
    assert FailureConfig(2) == FailureConfig(max_failures=2)
    assert CheckpointConfig(2, "loss", checkpoint_score_order="min") == CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    assert ScalingConfig({"CPU": 1}, 3) == ScalingConfig(trainer_resources={"CPU": 1}, num_workers=3)
    with pytest.raises(TypeError, match="at most 2 positional arguments"):
        FailureConfig(1, False, 2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="one value for max_failures, got two"):
        FailureConfig(1, max_failures=2)  # type: ignore[misc]


def test_automatic_metric_is_found_without_its_underscore() -> None:
    metrics = {"_training_iteration": 3, "_timestamp": 5, "timestamp": 7}
    found = [find_metric(metrics, name, "none") for name in ("training_iteration", "timestamp", "loss")]
    assert found == [3, 7, "none"]


def test_trainer_that_is_used_as_a_function_names_as_trainable() -> None:
    trainer = DataParallelTrainer(print)
    with pytest.raises(ConfigurationError, match=r"Pass trainer\.as_trainable\(\) to ray\.tune\.Tuner"):
        trainer({"lr": 0.1})
    with pytest.raises(ConfigurationError, match="DT-750"):
        getattr(trainer, "__name__")  # noqa: B009 - as Ray Tune does
