"""What `hvd.init()` finds in a worker, and what is said where it cannot work."""

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
    WorkerInfo,
)
from drivetrain_horovod import HorovodConfig, HorovodTrainer
from drivetrain_horovod._backend import HorovodBackend, _gpus_of_nodes, _slots


def facts() -> dict[str, Any]:
    preloaded = "horovod.torch" in sys.modules
    import horovod.torch as hvd

    hvd.init()
    sizes = {"size": hvd.size(), "local_size": hvd.local_size(), "cross_size": hvd.cross_size()}
    ranks = hvd.allgather_object((hvd.rank(), hvd.local_rank(), hvd.cross_rank()))
    names = hvd.allgather_object(os.environ.get("HOROVOD_GLOO_IFACE"))
    return {**sizes, "ranks": ranks, "interfaces": names, "preloaded": preloaded}


def test_ranks_find_each_other_over_the_loopback_with_horovod_preloaded(fit: Callable[..., Result]):
    assert fit(facts).return_value == {
        "size": 2,
        "local_size": 2,
        "cross_size": 1,
        "ranks": [(0, 0, 0), (1, 1, 0)],
        "interfaces": ["lo", "lo"],
        "preloaded": True,
    }


def test_first_of_the_named_interfaces_that_a_worker_has_is_used(fit: Callable[..., Result]):
    config = HorovodConfig(nics={"lo", "eno99"}, timeout_s=30)
    assert fit(facts, horovod=config).return_value["interfaces"] == ["lo", "lo"]


@pytest.mark.parametrize("workers", [0, 1])
def test_single_process_needs_no_network_and_leaves_the_environment_as_it_was(fit: Callable[..., Result], workers: int):
    before = dict(os.environ)
    for _ in range(2):
        assert fit(facts, workers=workers).return_value["size"] == 1
    assert dict(os.environ) == before


def make_workers(**sizes: int) -> list[WorkerInfo]:
    """Workers of nodes of these sizes, each with a GPU."""
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


def test_slots_are_those_that_horovodrun_gives_out():
    from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts

    wanted = get_host_assignments(parse_hosts("a:2,b:3,c:1"), 6)
    assert [SlotInfo(*slot.values()) for slot in _slots(make_workers(a=2, b=3, c=1))] == wanted


def test_workers_see_the_gpus_of_their_node_by_local_rank():
    assert _gpus_of_nodes(make_workers(a=2, b=1)) == ["0,1", "0,1", "0"]


def test_interface_that_no_worker_has_is_refused_with_those_that_there_are(fit: Callable[..., Result]):
    with pytest.raises(ConfigurationError, match=r"found none of eno99 on rank 0 \(.*\): there are .*lo"):
        fit(facts, horovod=HorovodConfig(nics={"eno99"}))


def test_framework_that_horovod_was_not_built_for_is_named(fit: Callable[..., Result]):
    def train() -> None:
        import horovod.tensorflow as hvd

        hvd.init()

    words = r'built with tensorflow, got one built with torch \S+: see "Building Horovod"'
    with pytest.raises(TrainingFailedError, match=words) as caught:
        fit(train)
    assert isinstance(caught.value.__cause__, PluginError)
    assert isinstance(caught.value.__cause__.__cause__, ImportError)


@pytest.fixture
def other_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed Horovod without its library, in front of it on the path of workers."""
    spec = importlib.util.find_spec("horovod")
    folder = tmp_path / "other"
    libraries = shutil.ignore_patterns("mpi_lib*.so", "__pycache__")
    shutil.copytree(Path(spec.origin).parent, folder / "horovod", ignore=libraries)
    monkeypatch.syspath_prepend(str(folder))
    return folder / "horovod"


def test_horovod_without_torch_says_how_it_was_built_and_how_to_build_it(fit: Callable[..., Result], other_build: Path):
    (other_build / "metadata.json").write_text(json.dumps({"tensorflow": "2.21.0"}))
    (other_build / "tensorflow" / "mpi_lib.so").touch()

    def train() -> None:
        import horovod.torch as other

        other.init()

    words = "built with torch, got one built with tensorflow 2.21.0: run python -m drivetrain_horovod.build"
    with pytest.raises(TrainingFailedError, match=words) as caught:
        fit(train)
    assert isinstance(caught.value.__cause__.__cause__, AttributeError)


def test_horovod_without_any_framework_is_refused_before_the_train_function(
    fit: Callable[..., Result], other_build: Path
):
    words = "one that was built with no framework on rank 0 .* run there: python -m drivetrain_horovod.build"
    with pytest.raises(PluginError, match=words):
        fit(facts)


def test_error_of_the_train_function_that_is_not_about_the_build_stays_as_it_is(fit: Callable[..., Result]):
    def train() -> None:
        import horovod.torch as hvd

        hvd.innit()

    with pytest.raises(TrainingFailedError) as caught:
        fit(train)
    assert type(caught.value.__cause__) is AttributeError


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"nics": "eth0"}, r"expected names of network interfaces such as .* got 'eth0'"),
        ({"nics": []}, "expected names of network interfaces"),
        ({"timeout_s": 0}, "timeout_s=...\\): expected a number of seconds of at least 1, got 0"),
        ({"placement_group_timeout_s": "long"}, "placement_group_timeout_s=...\\): expected a number of seconds"),
        ({"elastic": "yes"}, "elastic=...\\): expected True or False, got 'yes'"),
        ({"verbose": True}, "verbose=...\\): expected 0, 1, 2 or 3, got True"),
    ],
)
def test_setting_out_of_range_is_refused(option: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        HorovodConfig(**option)


def test_trainer_wants_a_horovod_config():
    with pytest.raises(ConfigurationError, match=r"horovod_config=\.\.\.\): expected HorovodConfig, got 'gloo'"):
        HorovodTrainer(facts, horovod_config="gloo")  # type: ignore[arg-type]


def test_settings_of_ssh_and_horovods_launcher_are_taken():
    config = HorovodConfig(key="k", ssh_port=22, ssh_identity_file="id", ssh_str="s", placement_group_timeout_s=5)
    assert isinstance(config.create(), HorovodBackend)


def test_declaration_imports_no_framework():
    script = (
        "import sys, drivetrain_horovod as d; d.HorovodConfig().create(); "
        "assert not {'horovod', 'torch', 'numpy', 'psutil'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_backend_is_known_by_its_name(tmp_path: Path):
    trainer = DataParallelTrainer(
        lambda: facts()["size"],
        backend_config="horovod",
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, start_timeout_s=60),
    )
    assert trainer.fit().return_value == 2
