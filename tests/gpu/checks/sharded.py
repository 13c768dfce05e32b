"""DDP, FSDP and FSDP2: the checkpoints of a ``TrainState`` are saved and loaded."""

import warnings
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import Checkpoint
from drivetrain_torch import TorchConfig, TrainState, get_device
from tests.gpu.check import Figures, Run, check, decreases, difference, equal

STEPS, SAVED = 12, 6


def parallelize(model: Any, strategy: str) -> Any:
    """Wrap a model even for a single worker, for which prepare_model does not wrap it."""
    import torch.distributed as dist

    device = get_device()
    if strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model.to(device), device_ids=[device] if device.type == "cuda" else None)
    if strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = model.to(device)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole_state(model: Any, optimizer: Any) -> Any:
    """Return the unsharded state of the model and of the optimizer in host memory."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns about its own code
        state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return in_host_memory(state)


def in_host_memory(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: in_host_memory(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(in_host_memory, value))
    return value.detach().cpu().clone() if hasattr(value, "cpu") else value


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train and save half-way, or resume from that checkpoint."""
    from tests.gpu.training import gather, make_model, make_optimizer, own_part, train_steps

    model = parallelize(make_model(seed=0 if drivetrain.get_checkpoint() is None else 1), config["strategy"])
    optimizer, batch = make_optimizer(model), own_part(get_device())
    losses: list[float] = []
    state = TrainState(model, optimizer)
    if not state.is_restored:
        losses += train_steps(model, optimizer, batch, SAVED)
        state.save({"loss": losses[-1]})
    restored = whole_state(model, optimizer)
    losses += train_steps(model, optimizer, batch, STEPS - SAVED)
    parameter = next(iter(model.parameters()))
    return {
        "state": restored,
        "losses": [sum(each) / len(each) for each in zip(*gather(losses), strict=True)],
        "wrapper": type(model).__name__,
        "parameter": type(parameter).__name__,
        "device": parameter.device.type,
    }


def load_alone(checkpoint: Checkpoint) -> Any:
    """Load the parameters in a process without a process group, on the CPU."""
    from tests.gpu.training import make_model

    model = make_model(seed=1)
    TrainState(model).load(checkpoint)
    return in_host_memory(model.state_dict())


def identical(name: str, got: Any, expected: Any) -> None:
    import torch

    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, msg=lambda text: f"weights {name}: {text}")
    torch.testing.assert_close(
        got[1]["state"], expected[1]["state"], rtol=0, atol=0, msg=lambda text: f"optimizer state {name}: {text}"
    )


def expect_resumable(run: Run, strategy: str, saved_by: int, loaded_by: int, **options: Any) -> Figures:
    import torch

    config = {"strategy": strategy}
    result = run.fit(train, config, workers=saved_by, **options)
    got = result.return_value
    equal("device of the parameters", got["device"], run.device)
    decreases("loss", got["losses"])
    with result.checkpoint.as_directory() as directory:
        sizes = {file.name: file.stat().st_size for file in Path(directory).iterdir() if not file.name.startswith(".")}
    parts = [f"__{rank}_0.distcp" for rank in range(saved_by)]
    equal("files", sorted(sizes), ["state.pt"] if strategy == "ddp" else [*parts, "sharded.json", "state.pt"])
    weights = load_alone(result.checkpoint)
    torch.testing.assert_close(weights, got["state"][0], rtol=0, atol=0, msg=lambda text: f"loaded on the CPU: {text}")
    resumed = run.fit(train, config, workers=loaded_by, resume_from_checkpoint=result.checkpoint).return_value
    identical("loaded on the GPU", resumed["state"], got["state"])
    return {
        "wrapper": got["wrapper"],
        "parameters": got["parameter"],
        "workers": saved_by,
        "checkpoint KiB": sum(sizes.values()) >> 10,
        "largest difference of a loss after resuming": difference(resumed["losses"], got["losses"][SAVED:], 1e-4),
    }


@check(limit_s=120)
def ddp(run: Run) -> Figures:
    """A checkpoint of a DistributedDataParallel model is loaded on the GPU and on the CPU"""
    return expect_resumable(run, "ddp", 1, 1)


@check(limit_s=120)
def fsdp(run: Run) -> Figures:
    """A sharded checkpoint of a FullyShardedDataParallel model is loaded on the GPU and on the CPU"""
    return expect_resumable(run, "fsdp", 1, 1)


@check(limit_s=120)
def fsdp2(run: Run) -> Figures:
    """A sharded checkpoint of a fully_shard model is loaded on the GPU and on the CPU"""
    return expect_resumable(run, "fully_shard", 1, 1)


@check(limit_s=120)
def two_workers_share_a_gpu(run: Run) -> Figures:
    """Two workers on one GPU save a checkpoint, and one worker loads it"""
    return expect_resumable(run, "ddp", 2, 1, gpus_per_worker=0.5, torch_config=TorchConfig(backend="gloo"))


@check(gpus=2, limit_s=120)
def fsdp_on_several_gpus(run: Run) -> Figures:
    """FullyShardedDataParallel shards over several GPUs, and a single GPU loads the checkpoint"""
    return expect_resumable(run, "fsdp", run.workers(), 1)


@check(gpus=2, limit_s=120)
def fsdp2_on_several_gpus(run: Run) -> Figures:
    """fully_shard shards over several GPUs, and a single GPU loads the checkpoint"""
    return expect_resumable(run, "fully_shard", run.workers(), 1)
