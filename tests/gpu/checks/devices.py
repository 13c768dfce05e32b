"""Device placement of workers, models and batches."""

import os
from typing import Any

from drivetrain_torch import get_device, get_devices, prepare_data_loader, prepare_model
from tests.gpu.check import Figures, Run, check, equal


def place() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from tests.gpu.training import gather, make_data, make_model

    model = prepare_model(make_model())
    unmoved_model = prepare_model(make_model(), move_to_device=False, parallel_strategy=None)
    features, labels = make_data(96)

    def nest(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "more": [(torch.stack(y), "text"), {"count": len(y)}]}

    loader = DataLoader(TensorDataset(features, labels), batch_size=16, collate_fn=nest)
    moved = list(prepare_data_loader(loader))
    unmoved = list(prepare_data_loader(loader, move_to_device=False))
    rows = torch.cat([batch["x"].cpu() for batch in moved])
    part = features[dist.get_rank() :: dist.get_world_size()]
    return {
        "device": gather(str(get_device())),
        "all devices": gather([str(device) for device in get_devices()]),
        "model": {str(parameter.device) for parameter in model.parameters()},
        "wrapper": type(model).__name__,
        "unmoved model": {str(parameter.device) for parameter in unmoved_model.parameters()},
        "moved batches": {str(tensor.device) for batch in moved for tensor in (batch["x"], batch["more"][0][0])},
        "other values": [batch["more"][0][1] for batch in moved] + [batch["more"][1] for batch in moved],
        "unmoved batches": {str(batch["x"].device) for batch in unmoved},
        "rows are this rank's": torch.equal(rows, part),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def expect_placement(run: Run, workers: int) -> dict[str, Any]:
    got = run.fit(place, workers=workers).return_value
    devices = [f"cuda:{rank}" if run.device == "cuda" else "cpu" for rank in range(workers)]
    equal("get_device() of each rank", got["device"], devices)
    equal("get_devices() of each rank", got["all devices"], [[device] for device in devices])
    equal("device of the prepared model", got["model"], {devices[0]})
    equal("wrapper", got["wrapper"], "Sequential" if workers == 1 else "DistributedDataParallel")
    equal("device of the model with move_to_device=False", got["unmoved model"], {"cpu"})
    equal("device of the batches", got["moved batches"], {devices[0]})
    batches = 96 // workers // 16
    equal("values other than tensors", got["other values"], ["text"] * batches + [{"count": 16}] * batches)
    equal("device of the batches with move_to_device=False", got["unmoved batches"], {"cpu"})
    equal("rows of rank 0 are its part of the data", got["rows are this rank's"], True)
    return got


@check()
def placement(run: Run) -> Figures:
    """get_device, get_devices, prepare_model and prepare_data_loader use the worker's GPU"""
    got = expect_placement(run, 1)
    return {"device": got["device"][0], "CUDA_VISIBLE_DEVICES": got["visible"]}


@check(gpus=2)
def placement_on_several_gpus(run: Run) -> Figures:
    """Each of several workers gets a different GPU"""
    got = expect_placement(run, run.workers())
    return {"CUDA_VISIBLE_DEVICES": got["visible"]}


def train_wrapped() -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from tests.gpu.training import make_model, make_optimizer, own_part, train_steps

    device = get_device()
    model = DistributedDataParallel(make_model().to(device), device_ids=[device] if device.type == "cuda" else None)
    losses = train_steps(model, make_optimizer(model), own_part(device), steps=30)
    return {"losses": losses, "backend": dist.get_backend()}


@check()
def gpu_and_cpu_learn_the_same(run: Run) -> Figures:
    """DistributedDataParallel on the GPU reaches the same losses as on the CPU"""
    from drivetrain import ScalingConfig
    from drivetrain_torch import TorchTrainer

    got = run.fit(train_wrapped).return_value
    on_cpu = TorchTrainer(
        train_wrapped, scaling_config=ScalingConfig(num_workers=1, runtime="local"), run_config=run.run_config()
    )
    expected = on_cpu.fit().return_value
    equal("backends", (got["backend"], expected["backend"]), (run.collectives, "gloo"))
    difference = max(abs(a - b) for a, b in zip(got["losses"], expected["losses"], strict=True))
    assert difference < 0.05, f"losses: expected a difference below 0.05, got {difference}"
    return {"largest difference of a loss": difference}


def allocate_too_much() -> None:
    import torch

    memory = torch.cuda.get_device_properties(get_device()).total_memory
    torch.empty(2 * memory, dtype=torch.uint8, device=get_device())


@check(on_cpu=False)
def out_of_memory(run: Run) -> Figures:
    """An allocation that exceeds the GPU's memory is reported as out of memory"""
    from drivetrain import FailureKind, TrainingFailedError

    try:
        run.fit(allocate_too_much)
    except TrainingFailedError as error:
        equal("kind of the failure", error.kind, FailureKind.OUT_OF_MEMORY)
        return {"error": str(error).splitlines()[0][:120]}
    raise AssertionError("expected a TrainingFailedError, got none")
