"""The process group that a train function runs in."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import drivetrain
from drivetrain import ConfigurationError, Result, TrainingFailedError
from drivetrain_torch import TorchConfig, prepare_model
from tests.support import PROCESS_LIMIT_S
from tests.torch.conftest import gather

GROUP_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME")


def group_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in GROUP_VARIABLES if name in os.environ}


def test_process_group_is_initialized_when_the_train_function_starts(fit: Callable[..., Result]):
    def train() -> list[tuple[Any, ...]]:
        context = drivetrain.get_context()
        assert (dist.get_rank(), dist.get_world_size()) == (context.get_world_rank(), context.get_world_size())
        return gather((dist.get_rank(), dist.get_backend(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]))

    ranks = fit(train).return_value
    assert [rank[:2] for rank in ranks] == [(0, "gloo"), (1, "gloo")]
    assert all(str(threads) == variable for _, _, threads, variable in ranks)


def test_second_fit_of_a_driver_gets_a_new_process_group(fit: Callable[..., Result]):
    def train() -> list[int]:
        return gather(int(os.environ["MASTER_PORT"]))

    first, second = (fit(train).return_value for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1


def test_process_group_created_by_the_user_connects_to_the_existing_store(fit: Callable[..., Result]):
    def train() -> float:
        dist.barrier()  # or else the other rank may still be connecting to this one
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert fit(train).return_value == 2


def test_second_init_process_group_fails_with_the_message_of_torch(fit: Callable[..., Result]):
    def train() -> None:
        dist.init_process_group("gloo")

    with pytest.raises(TrainingFailedError, match="initialize the default process group twice") as caught:
        fit(train)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(("method", "names"), [("env", GROUP_VARIABLES), ("tcp", ("GLOO_SOCKET_IFNAME",))])
def test_init_method_affects_the_variables_but_not_the_group(
    fit: Callable[..., Result], method: str, names: tuple[str, ...]
):
    def train() -> list[dict[str, str]]:
        return gather(group_variables())

    for variables in fit(train, torch_config=TorchConfig(init_method=method)).return_value:
        assert set(variables) == set(names)
        assert variables["GLOO_SOCKET_IFNAME"] == "lo"


def test_network_interface_chosen_by_the_user_is_kept(fit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch):
    def train() -> list[str]:
        return gather(os.environ["GLOO_SOCKET_IFNAME"])

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert fit(train).return_value == ["lo,lo"] * 2


@pytest.mark.parametrize("chosen", [None, "false"])
def test_accelerate_variables_select_the_cpu_unless_the_user_has_set_them(
    fit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, chosen: str | None
):
    def train() -> list[tuple[str, str]]:
        return gather((os.environ["ACCELERATE_TORCH_DEVICE"], os.environ["ACCELERATE_USE_CPU"]))

    if chosen is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", chosen)
    assert fit(train).return_value == [("cpu", chosen or "true")] * 2


def test_backend_that_torch_lacks_is_reported_as_a_failed_setup(fit: Callable[..., Result]):
    with pytest.raises(TrainingFailedError, match=r"failed while setting up torch: .*NCCL"):
        fit(print, torch_config=TorchConfig(backend="nccl"))


def test_collective_that_a_rank_never_joins_fails_after_the_timeout(fit: Callable[..., Result]):
    def train() -> None:
        if dist.get_rank() == 1:
            threading.Event().wait(600)
        dist.all_reduce(torch.ones(1))

    started_at = time.monotonic()
    with pytest.raises(TrainingFailedError, match=r"rank 0 .*[Tt]imed out"):
        fit(train, torch_config=TorchConfig(timeout_s=5))
    assert time.monotonic() - started_at < 120


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("waits_in", ["all_reduce", "DistributedDataParallel"])
def test_rank_that_returns_early_causes_an_error_on_the_peer_that_waits_for_it(
    fit: Callable[..., Result], leaver: int, waits_in: str
):
    def train(config: dict[str, Any]) -> None:
        model = prepare_model(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        if dist.get_rank() == config["leaver"]:
            return
        if config["waits_in"] == "all_reduce":
            dist.all_reduce(torch.ones(1))
        model(torch.ones(1, 2)).sum().backward()

    started_at = time.monotonic()
    with pytest.raises(TrainingFailedError, match=rf"ranks that had already finished: {leaver}") as caught:
        fit(train, {"leaver": leaver, "waits_in": waits_in})
    assert caught.value.rank == 1 - leaver
    assert time.monotonic() - started_at < 120


def test_rank_that_returns_early_causes_an_error_in_the_first_run_of_a_driver_too(tmp_path: Path):
    """Nothing is imported before the first workers are forked, so modules that they import may capture the group."""
    script = tmp_path / "early.py"
    script.write_text(
        "import sys, drivetrain\n"
        "from drivetrain_torch import TorchTrainer, prepare_model\n"
        "def train():\n"
        "    import torch\n"
        "    model = prepare_model(torch.nn.Linear(2, 2))\n"
        "    while torch.distributed.get_rank() == 0:\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "TorchTrainer(train, scaling_config=drivetrain.ScalingConfig(num_workers=2, runtime='local'),\n"
        "    run_config=drivetrain.RunConfig(storage_path=sys.argv[1])).fit()\n"
    )
    command = [sys.executable, script, tmp_path]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PROCESS_LIMIT_S)
    assert finished.returncode == 1
    assert "ranks that had already finished: 1" in finished.stderr


def test_in_process_run_restores_the_environment_so_that_the_next_one_works(
    fit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    def train() -> dict[str, str]:
        assert dist.get_world_size() == 1
        return group_variables()

    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads() + 1))
    before = (dict(os.environ), torch.get_num_threads())
    for _ in range(2):
        assert set(fit(train, workers=0).return_value) == set(GROUP_VARIABLES)
        assert (dict(os.environ), torch.get_num_threads()) == before
        assert not dist.is_initialized()


def test_failed_in_process_run_restores_the_environment(fit: Callable[..., Result]):
    def train() -> None:
        raise LookupError("in the train function")

    before = dict(os.environ)
    with pytest.raises(TrainingFailedError, match="in the train function"):
        fit(train, workers=0)
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_process_group_of_the_driver_is_refused_and_not_changed(fit: Callable[..., Result]):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TrainingFailedError, match="destroy_process_group") as caught:
            fit(print, workers=0)
        assert isinstance(caught.value.__cause__, ConfigurationError)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_modules_imported_before_the_fork_start_no_thread_and_do_not_use_the_gpu():
    backend = TorchConfig().create()
    code = (
        "import importlib, json, os, sys\n"
        "for names in json.loads(sys.argv[1]):\n"
        "    for name in names:\n"
        "        importlib.import_module(name)\n"
        "    if (pid := os.fork()) == 0:\n"  # some libraries stop their threads here
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    print(len(os.listdir('/proc/self/task')), sys.modules['torch'].cuda.is_initialized())\n"
    )
    modules = json.dumps([backend.preload, backend.warmup])
    output = subprocess.run([sys.executable, "-c", code, modules], check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == ["1 False"] * 2


def test_first_wrapped_model_of_a_run_does_not_import_the_compiler(fit: Callable[..., Result]):
    def train() -> int:
        before = set(sys.modules)
        prepare_model(torch.nn.Linear(2, 2))
        return len(set(sys.modules) - before)

    assert fit(train).return_value < 20
