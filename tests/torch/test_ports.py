"""``DRIVETRAIN_PORTS`` and ``RunConfig(ports=...)`` select the ports of the driver and of PyTorch's store."""

import os
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import ConfigurationError, RunConfig, ScalingConfig
from drivetrain_launch import CommandRuntime
from drivetrain_torch import TorchTrainer
from tests.support import free_port

_LISTENING = "0A"


def report_ports() -> None:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [int(fields[1].partition(":")[2], 16) for fields in sockets if fields[3] == _LISTENING]
    drivetrain.report({"port": int(os.environ["MASTER_PORT"]), "sum": ones.item(), "listening": listening})


@pytest.mark.parametrize("source", ["environment", "config"])
@pytest.mark.parametrize("runtime", ["local", CommandRuntime("{worker}")], ids=["local", "command"])
def test_driver_and_store_listen_on_selected_ports(
    source: str, runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_port()
    ports = f"{first}-{first + 9}"
    if source == "environment":
        monkeypatch.setenv("DRIVETRAIN_PORTS", ports)
    trainer = TorchTrainer(
        report_ports,
        scaling_config=ScalingConfig(num_workers=2, runtime=runtime),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, ports=ports if source == "config" else None),
    )
    metrics = trainer.fit().metrics

    selected = range(first, first + 10)
    assert metrics["port"] in selected
    assert metrics["sum"] == 2
    listening = [port for port in metrics["listening"] if port in selected and port != metrics["port"]]
    assert len(listening) == (0 if runtime == "local" else 1), "the driver listens if workers connect to it"


def test_ports_of_the_config_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"RunConfig\(ports=...\): expected a range of ports, .* got '29500'"):
        RunConfig(ports="29500")
