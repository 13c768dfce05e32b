"""Describes PyTorch for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import SessionError, TrainContext
from drivetrain.plugin import Framework
from drivetrain.plugin.backends import is_instance_of
from drivetrain_torch._devices import get_devices

if TYPE_CHECKING:
    import torch

__all__ = ["WARMUP", "TorchFramework", "group_variables"]

WARMUP = ("torch.distributed.nn", "sympy", "drivetrain_torch._warmup", "torch.distributed.fsdp")
"""The modules that a training imports with its first ``DistributedDataParallel`` or optimizer: torch's compiler.

``torch.distributed.nn`` comes first, because it must be imported before there is a process group.
"""

_OF_PROCESS = (
    ("torch.distributed", "ProcessGroup"),
    ("torch.distributed", "Store"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.utils.data.distributed", "DistributedSampler"),
)
"""Classes whose objects contain a process group, or the rank and the world size."""


class TorchFramework(Framework):
    """Seeds PyTorch's generators, and knows the objects that contain a process group or a rank."""

    warmup = WARMUP

    def reseed(self) -> None:
        """Seed the generator of the CPU. Those of an accelerator, which no fork has, are seeded when it is opened."""
        import torch

        torch.default_generator.seed()  # torch.seed() would first format a stack, for an accelerator

    def limit_threads(self, threads: int) -> None:
        """Limit the threads of operations on the CPU."""
        import torch

        if torch.get_num_threads() > threads:
            torch.set_num_threads(threads)

    def random_state(self) -> Mapping[str, Any]:
        """Return the states of the default generators of the CPU and of the worker's GPUs."""
        import torch

        state: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = [torch.cuda.get_rng_state(device) for device in _gpus()]
        return state

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the generators of the CPU and of as many GPUs as there are states."""
        import torch

        # A state that was saved by another framework's TrainState consists of NumPy's arrays.
        torch.set_rng_state(torch.as_tensor(state["cpu"]).cpu())
        for device, saved in zip(_gpus(), state.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(torch.as_tensor(saved).cpu(), device)

    def belongs_to_process(self, value: object) -> bool:
        """Return True for process groups, and for models and samplers that were created for one."""
        return any(is_instance_of(value, module, name) for module, name in _OF_PROCESS)

    def launcher_variables(self, context: TrainContext, max_failures: int) -> Mapping[str, str]:
        """Return the variables by which scripts and libraries recognize ``torchrun``."""
        return {
            **group_variables(context),
            "TORCHELASTIC_MAX_RESTARTS": str(sys.maxsize if max_failures < 0 else max_failures),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 of the script serves the store
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP",
            "TORCHELASTIC_ERROR_FILE": "",  # drivetrain receives the exception itself
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(context.get_world_rank()),
            "ROLE_WORLD_SIZE": str(context.get_world_size()),
        }


def _gpus() -> list[torch.device]:
    """Return the GPUs of this worker; outside a train function, those that the process uses."""
    import torch

    try:
        return [device for device in get_devices() if device.type == "cuda"]
    except SessionError:
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return [torch.device("cuda", torch.cuda.current_device())] if is_used else []


def group_variables(context: TrainContext) -> dict[str, str]:
    """Return the variables by which libraries find out that this process belongs to a group, also in a train function.

    ``TORCHELASTIC_RUN_ID`` makes Lightning use the ranks of this group, even in a Slurm job. The variables of
    ``fabric run`` make ``lightning.fabric.Fabric()`` train on all workers. Without them, each worker on a CPU would
    train alone. ``LT_CLI_USED`` is not set, because Fabric would then refuse ``fabric.launch()``, which most scripts
    call.
    """
    size, size_of_node = context.get_world_size(), context.get_local_world_size()
    variables = {
        "TORCHELASTIC_RUN_ID": context.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(context.attempt),
    }
    if size > 1:
        variables |= {"LT_DEVICES": str(size_of_node), "LT_NUM_NODES": str(size // size_of_node)}
    if sys.platform == "linux" and size_of_node == size:
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return variables
