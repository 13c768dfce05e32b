"""The devices that a worker gets. These tests run on machines without a GPU, so none of them calls CUDA."""

from pathlib import Path

import pytest
import torch

from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig, SessionError
from drivetrain.plugin import WorkerInfo
from drivetrain.plugin.backends import node_accelerators
from drivetrain_torch import get_device, get_devices
from drivetrain_torch._devices import cuda_indices


def train() -> tuple[torch.device, list[torch.device]]:
    return get_device(), get_devices()


@pytest.fixture
def devices(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[torch.device, list[torch.device]]:
    """The devices of rank 0 with the scaling given as parameter, in a run without a backend, which would call CUDA."""
    return (
        DataParallelTrainer(
            train,
            scaling_config=ScalingConfig(**request.param),
            run_config=RunConfig(storage_path=tmp_path, verbose=0),
        )
        .fit()
        .return_value
    )


@pytest.mark.parametrize(
    "devices", [{"num_workers": 0}, {"num_workers": 2, "runtime": "local"}], indirect=True, ids=["inprocess", "local"]
)
def test_without_gpus_the_device_is_the_cpu(devices: tuple[torch.device, list[torch.device]]):
    assert devices == (torch.device("cpu"), [torch.device("cpu")])


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    "devices",
    [{"num_workers": 2, "use_gpu": True, "resources_per_worker": {"GPU": 3}, "runtime": "local"}],
    indirect=True,
)
def test_worker_with_several_gpus_gets_all_of_them(devices: tuple[torch.device, list[torch.device]]):
    assert devices == (torch.device("cuda:0"), [torch.device("cuda", index) for index in range(3)])


@pytest.mark.parametrize(
    ("gpus", "visible", "indices"),
    [
        ([], None, []),
        ([], "0,1", []),
        (["3"], "3", [0]),
        (["2", "3"], "2,3", [0, 1]),
        (["2", "3"], "0,1,2,3", [2, 3]),
        (["2"], "3, 2", [1]),
        (["2", "3"], None, [2, 3]),
        (["GPU-5a", "MIG-7"], "GPU-11,GPU-5a,MIG-7", [1, 2]),
    ],
)
def test_gpus_are_numbered_among_the_visible_gpus(gpus: list[str], visible: str | None, indices: list[int]):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cuda_indices(gpus, environment) == indices


def test_workers_of_a_node_share_their_gpus_in_the_order_of_their_local_ranks():
    def worker(rank: int, node: str, *gpus: str) -> WorkerInfo:
        return WorkerInfo(
            rank=rank, local_rank=0, node_rank=0, node_id=node, hostname="", ip="", pid=0, accelerator_ids=gpus
        )

    one_each = [worker(0, "a", "3"), worker(1, "a", "7"), worker(2, "b", "3"), worker(3, "b", "7")]
    assert node_accelerators(one_each) == ["3,7"] * 4
    assert [cuda_indices(w.accelerator_ids, {"CUDA_VISIBLE_DEVICES": "3,7"}) for w in one_each] == [[0], [1]] * 2
    assert node_accelerators([worker(0, "a", "0", "1"), worker(1, "a", "2", "3"), worker(2, "b")]) == [
        "0,1,2,3"
    ] * 2 + [""]
    assert node_accelerators([worker(0, "a", "0"), worker(1, "a", "0")]) == ["0", "0"], "half a GPU each"


def test_gpu_that_the_process_cannot_see_is_named():
    with pytest.raises(ConfigurationError, match=r"this worker \(1, 3\), got '0,1', which hides 3\. Do not change"):
        cuda_indices(["1", "3"], {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize("function", [get_device, get_devices])
def test_getting_a_device_outside_a_train_function_is_refused(function: object):
    with pytest.raises(SessionError, match="inside a train function"):
        function()
