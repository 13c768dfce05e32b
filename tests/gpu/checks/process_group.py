"""The process group: NCCL, two backends in one group, and one GPU shared by two workers."""

from typing import Any

from drivetrain_torch import TorchConfig, get_device
from tests.gpu.check import Figures, Run, check, equal


def use_collectives() -> dict[str, Any]:
    """Call each collective on tensors of this worker's device, and return the results by name."""
    import torch
    import torch.distributed as dist

    device, rank, size = get_device(), dist.get_rank(), dist.get_world_size()
    own = torch.full((4,), float(rank + 1), device=device)
    summed = own.clone()
    dist.all_reduce(summed)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own)
    first = own.clone()
    dist.broadcast(first, src=0)
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    dist.barrier()
    return {
        "backend": dist.get_backend(),
        "devices": {tensor.device.type for tensor in (summed, *gathered, first)},
        "current": torch.cuda.current_device() if device.type == "cuda" else None,
        "device": str(device),
        "sum": summed.tolist(),
        "gathered": [tensor[0].item() for tensor in gathered],
        "first": first.tolist(),
        "objects": objects,
    }


def expect_collectives(got: dict[str, Any], run: Run, workers: int, backend: str) -> None:
    equal("backend", got["backend"], backend)
    equal("devices of the results", got["devices"], {run.device})
    equal("all_reduce", got["sum"], [float(sum(range(1, workers + 1)))] * 4)
    equal("all_gather", got["gathered"], [float(rank + 1) for rank in range(workers)])
    equal("broadcast", got["first"], [1.0] * 4)
    equal("all_gather_object", got["objects"], list(range(workers)))


@check()
def collectives(run: Run) -> Figures:
    """NCCL is the default backend, and its collectives work in two consecutive runs"""
    for _ in range(2):
        got = run.fit(use_collectives).return_value
        expect_collectives(got, run, 1, run.collectives)
    if run.device == "cuda":
        equal("current device", (got["device"], got["current"]), ("cuda:0", 0))
    return {"backend": got["backend"]}


@check(gpus=2)
def collectives_of_several_gpus(run: Run) -> Figures:
    """NCCL connects workers that have a GPU each"""
    workers = run.workers(8)
    got = run.fit(use_collectives, workers=workers).return_value
    expect_collectives(got, run, workers, run.collectives)
    return {"workers": workers}


def use_both_backends() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    tensors = [torch.ones(2, device=device) for device in ("cpu", get_device())]
    for tensor in tensors:
        dist.all_reduce(tensor)
    return {"sums": [tensor.tolist() for tensor in tensors], "devices": [tensor.device.type for tensor in tensors]}


@check()
def one_backend_for_each_device(run: Run) -> Figures:
    """A group with Gloo for CPU tensors and NCCL for CUDA tensors reduces both"""
    workers = run.workers()
    config = TorchConfig(backend="cpu:gloo,cuda:nccl" if run.device == "cuda" else "cpu:gloo")
    got = run.fit(use_both_backends, workers=workers, torch_config=config).return_value
    equal("sums", got["sums"], [[float(workers)] * 2] * 2)
    equal("devices", got["devices"], ["cpu", run.device])
    return {"workers": workers}


def train_on_shared_gpu() -> dict[str, Any]:
    import torch

    from drivetrain_torch import prepare_model
    from tests.gpu.training import gather, make_model, make_optimizer, own_part, train_steps

    model = prepare_model(make_model())
    losses = train_steps(model, make_optimizer(model), own_part(get_device()), steps=20)
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    all_weights = gather(weights)
    return {
        "wrapper": type(model).__name__,
        "devices": gather(str(get_device())),
        "identical": all(torch.equal(own, other) for own, other in zip(*all_weights, strict=True)),
        "losses": losses,
    }


@check()
def two_workers_share_a_gpu(run: Run) -> Figures:
    """Two workers with half a GPU each train one model over Gloo, with identical weights"""
    config = TorchConfig(backend="gloo")
    got = run.fit(train_on_shared_gpu, workers=2, gpus_per_worker=0.5, torch_config=config).return_value
    equal("wrapper", got["wrapper"], "DistributedDataParallel")
    equal("devices", got["devices"], ["cuda:0" if run.device == "cuda" else "cpu"] * 2)
    equal("weights of both ranks are identical", got["identical"], True)
    return {"loss": f"{got['losses'][0]:.3f} -> {got['losses'][-1]:.3f}"}


@check()
def in_the_process_of_the_driver(run: Run) -> Figures:
    """num_workers=0 uses the GPU from the driver's own process, before and after CUDA is initialized there"""
    for _ in range(2):
        got = run.fit(use_collectives, workers=0, runtime="inprocess").return_value
        expect_collectives(got, run, 1, run.collectives)
    return {"device": got["device"]}


@check()
def driver_uses_the_gpu_too(run: Run) -> Figures:
    """Workers train on the GPU while the driver's process holds tensors on it"""
    import torch

    own = torch.arange(1000.0, device=run.device)
    got = run.fit(use_collectives).return_value
    expect_collectives(got, run, 1, run.collectives)
    equal("the driver's tensor", own.sum().item(), 499500.0)
    return {}
