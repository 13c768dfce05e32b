"""The package's public names, its imports and the validation of its settings."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import drivetrain_torch
from drivetrain import ConfigurationError, DataParallelTrainer, Result, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain_torch import TorchConfig, TorchTrainer, TorchXLAConfig


def test_public_names_are_pinned():
    assert sorted(drivetrain_torch.__all__) == [
        "ParallelStrategy",
        "TorchConfig",
        "TorchTrainer",
        "TorchXLAConfig",
        "TrainState",
        "enable_reproducibility",
        "get_device",
        "get_devices",
        "get_random_states",
        "prepare_data_loader",
        "prepare_model",
        "set_random_states",
    ]


def test_importing_the_package_and_creating_a_trainer_does_not_import_torch():
    code = (
        "import json, sys, drivetrain_torch as d; d.TorchTrainer(print, torch_config=d.TorchXLAConfig()); "
        "print(json.dumps([name for name in sys.modules if name.partition('.')[0] in ('torch', 'numpy', 'ray')]))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == []


@pytest.mark.parametrize("config", [TorchConfig, TorchXLAConfig])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": ""}, "backend=.*got ''"),
        ({"backend": "cuda:"}, "backend="),
        ({"backend": 3}, "backend=.*got 3"),
        ({"init_method": "file"}, "init_method=.*'env' or 'tcp', got 'file'"),
        ({"timeout_s": 0}, "timeout_s=.*got 0"),
        ({"timeout_s": float("inf")}, "timeout_s="),
        ({"timeout_s": "60"}, "timeout_s=.*got '60'"),
        ({"timeout_s": True}, "timeout_s="),
    ],
)
def test_invalid_value_is_refused_when_the_config_is_created(config: type[TorchConfig], values: dict, message: str):
    with pytest.raises(ConfigurationError, match=f"{config.__name__}.{message}"):
        config(**values)


def test_config_of_the_wrong_type_is_refused():
    with pytest.raises(ConfigurationError, match=r"torch_config=.* expected TorchConfig, got 'nccl'"):
        TorchTrainer(print, torch_config="nccl")


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl", None])
def test_backend_names_of_torch_are_accepted(backend: str | None):
    assert TorchConfig(backend=backend).backend == backend


def test_backend_is_found_by_its_name(tmp_path: Path):
    def train() -> str:
        import torch

        return torch.distributed.get_backend()

    result = DataParallelTrainer(
        train,
        backend_config="torch",
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    ).fit()
    assert result.return_value == "gloo"


def test_missing_torch_xla_is_reported_with_the_command_to_install_it(fit: Callable[..., Result]):
    with pytest.raises(TrainingFailedError, match=r"is not installed\. Run: pip install torch_xla"):
        fit(print, torch_config=TorchXLAConfig())
