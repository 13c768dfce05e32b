"""The setup of Horovod on workers, and the messages if it cannot work."""

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    ConfigurationError,
    DataParallelTrainer,
    PluginError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain.plugin import WorkerInfo
from drivetrain_horovod import HorovodConfig, HorovodTrainer
from drivetrain_horovod._backend import HorovodBackend, _slots
from tests.support import PROCESS_LIMIT_S


def facts() -> dict[str, Any]:
    preloaded = "horovod.torch" in sys.modules
    import horovod.torch as hvd

    hvd.init()
    sizes = {"size": hvd.size(), "local_size": hvd.local_size(), "cross_size": hvd.cross_size()}
    ranks = hvd.allgather_object((hvd.rank(), hvd.local_rank(), hvd.cross_rank()))
    names = hvd.allgather_object(os.environ.get("HOROVOD_GLOO_IFACE"))
    return {**sizes, "ranks": ranks, "interfaces": names, "preloaded": preloaded}


def test_ranks_connect_over_the_loopback_interface_with_horovod_preloaded(fit: Callable[..., Result]):
    assert fit(facts).return_value == {
        "size": 2,
        "local_size": 2,
        "cross_size": 1,
        "ranks": [(0, 0, 0), (1, 1, 0)],
        "interfaces": ["lo", "lo"],
        "preloaded": True,
    }


def test_worker_uses_the_first_of_the_named_interfaces_that_it_has(fit: Callable[..., Result]):
    config = HorovodConfig(nics={"lo", "eno99"}, timeout_s=30)
    assert fit(facts, horovod=config).return_value["interfaces"] == ["lo", "lo"]


def test_workers_connect_again_after_a_shutdown(fit: Callable[..., Result]):
    def train() -> list[float]:
        import horovod.torch as hvd
        import torch

        totals = []
        for _ in range(10):
            hvd.init()
            totals.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
            hvd.shutdown()
        return totals

    assert fit(train).return_value == [2.0] * 10


def test_rendezvous_on_one_machine_cannot_be_reached_from_others(fit: Callable[..., Result]):
    def train() -> list[str]:
        import psutil

        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        sockets = psutil.Process().net_connections("tcp")
        return [each.laddr.ip for each in sockets if each.laddr.port == port and each.status == psutil.CONN_LISTEN]

    assert fit(train).return_value == ["127.0.0.1"]


def test_addresses_of_a_scope_are_deleted_although_another_scope_is_complete_first():
    from horovod.runner.common.util.hosts import SlotInfo

    from drivetrain_horovod._rendezvous import Handler, Server

    server = Server("127.0.0.1", Handler, [SlotInfo("node", rank, rank, 0, 2, 2, 1) for rank in range(2)], 0)
    try:

        def request(method: str, path: str, value: str | None = None) -> int:
            with contextlib.closing(http.client.HTTPConnection(server.address, server.port, timeout=30)) as connection:
                connection.request(method, path, value)
                return connection.getresponse().status

        for rank in range(2):
            assert request("PUT", f"/local_node/{rank}", "address") == 200
            assert request("GET", f"/local_node/{rank}") == 200
        assert request("DELETE", "/local_node/0") == 200
        assert request("GET", "/local_node/1") == 200, "rank 1 has not connected yet"
        assert request("DELETE", "/cross_0/0") == 200
        assert request("DELETE", "/local_node/1") == 200
        assert [request("GET", f"/local_node/{rank}") for rank in range(2)] == [404, 404]
    finally:
        server.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_single_process_needs_no_network_and_restores_the_environment(fit: Callable[..., Result], workers: int):
    before = dict(os.environ)
    for _ in range(2):
        assert fit(facts, workers=workers).return_value["size"] == 1
    assert dict(os.environ) == before


def make_workers(**sizes: int) -> list[WorkerInfo]:
    """Return the workers of nodes of these sizes, each worker with a GPU."""
    places = [(name, number, local) for number, name in enumerate(sizes) for local in range(sizes[name])]
    return [
        WorkerInfo(
            rank=rank,
            local_rank=local,
            node_rank=number,
            node_id=name,
            hostname=name,
            ip="127.0.0.1",
            pid=1000 + rank,
            accelerator_ids=(str(local),),
        )
        for rank, (name, number, local) in enumerate(places)
    ]


def test_slots_are_the_same_as_those_of_horovodrun():
    from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts

    expected = get_host_assignments(parse_hosts("a:2,b:3,c:1"), 6)
    assert [SlotInfo(*slot.values()) for slot in _slots(make_workers(a=2, b=3, c=1))] == expected


def test_interface_that_no_worker_has_is_refused_with_the_existing_ones(fit: Callable[..., Result]):
    with pytest.raises(ConfigurationError, match=r"got eno99, but rank 0 \(.*\) only has .*lo.*\. Use an interface"):
        fit(facts, horovod=HorovodConfig(nics={"eno99"}))


def test_framework_that_horovod_was_not_built_for_is_named(fit: Callable[..., Result]):
    def train() -> None:
        import horovod.tensorflow as hvd

        hvd.init()

    message = r'built with tensorflow, got one built with torch \S+\. See "Building Horovod"'
    with pytest.raises(TrainingFailedError, match=message) as caught:
        fit(train)
    assert isinstance(caught.value.__cause__, PluginError)
    assert isinstance(caught.value.__cause__.__cause__, ImportError)


@pytest.fixture
def other_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed Horovod without its library, before the original on the path of workers."""
    spec = importlib.util.find_spec("horovod")
    folder = tmp_path / "other"
    libraries = shutil.ignore_patterns("mpi_lib*.so", "__pycache__")
    shutil.copytree(Path(spec.origin).parent, folder / "horovod", ignore=libraries)
    monkeypatch.syspath_prepend(str(folder))
    return folder / "horovod"


def test_horovod_without_torch_is_reported_with_its_build_and_the_build_command(
    fit: Callable[..., Result], other_build: Path
):
    (other_build / "metadata.json").write_text(json.dumps({"tensorflow": "2.21.0"}))
    (other_build / "tensorflow" / "mpi_lib.so").touch()

    def train() -> None:
        import horovod.torch as other

        other.init()

    message = r"built with torch, got one built with tensorflow 2.21.0\. Run: python -m drivetrain_horovod.build"
    with pytest.raises(TrainingFailedError, match=message) as caught:
        fit(train)
    assert isinstance(caught.value.__cause__.__cause__, AttributeError)


def test_horovod_without_any_framework_is_refused_before_the_train_function(
    fit: Callable[..., Result], other_build: Path
):
    message = "one that was built without a framework on rank 0 .* run there: python -m drivetrain_horovod.build"
    with pytest.raises(PluginError, match=message):
        fit(facts)


def test_error_of_the_train_function_that_is_unrelated_to_the_build_is_unchanged(fit: Callable[..., Result]):
    def train() -> None:
        import horovod.torch as hvd

        hvd.innit()

    with pytest.raises(TrainingFailedError) as caught:
        fit(train)
    assert type(caught.value.__cause__) is AttributeError


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"nics": "eth0"}, r"expected names of network interfaces such as .* got 'eth0'"),
        ({"nics": []}, "expected names of network interfaces"),
        ({"timeout_s": 0}, "timeout_s=...\\): expected a number of seconds of at least 1, got 0"),
        ({"placement_group_timeout_s": "long"}, "placement_group_timeout_s=...\\): expected a number of seconds"),
        ({"elastic": "yes"}, "elastic=...\\): expected True or False, got 'yes'"),
        ({"verbose": True}, "verbose=...\\): expected 0, 1, 2 or 3, got True"),
    ],
)
def test_invalid_setting_is_refused(option: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        HorovodConfig(**option)


def test_trainer_requires_a_horovod_config():
    with pytest.raises(ConfigurationError, match=r"horovod_config=\.\.\.\): expected HorovodConfig, got 'gloo'"):
        HorovodTrainer(facts, horovod_config="gloo")  # type: ignore[arg-type]


def test_settings_of_ssh_and_of_horovods_launcher_are_accepted():
    config = HorovodConfig(key="k", ssh_port=22, ssh_identity_file="id", ssh_str="s", placement_group_timeout_s=5)
    assert isinstance(config.create(), HorovodBackend)


def test_creating_a_backend_does_not_import_a_framework():
    script = (
        "import sys, drivetrain_horovod as d; d.HorovodConfig().create(); "
        "assert not {'horovod', 'torch', 'numpy', 'psutil'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROCESS_LIMIT_S)


def test_backend_is_found_by_its_name(tmp_path: Path):
    trainer = DataParallelTrainer(
        lambda: facts()["size"],
        backend_config="horovod",
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, start_timeout_s=180),
    )
    assert trainer.fit().return_value == 2
