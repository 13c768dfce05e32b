"""``DRIVETRAIN_PORTS`` also selects the port of PyTorch's store."""

import os
from pathlib import Path

import pytest

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer
from tests.support import free_port


def report_port() -> None:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    drivetrain.report({"port": int(os.environ["MASTER_PORT"]), "sum": ones.item()})


def test_store_listens_on_a_selected_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setenv("DRIVETRAIN_PORTS", f"{first}-{first + 9}")
    trainer = TorchTrainer(
        report_port,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    )
    metrics = trainer.fit().metrics

    assert first <= metrics["port"] <= first + 9
    assert metrics["sum"] == 2
