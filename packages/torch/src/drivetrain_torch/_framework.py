"""Describes PyTorch for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from drivetrain import TrainContext
from drivetrain.plugin import Framework
from drivetrain.plugin.backends import is_instance_of

__all__ = ["TorchFramework", "group_variables"]

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

    def reseed(self) -> None:
        """Seed the default generators. Those of an accelerator that is not initialized are seeded when it is."""
        import torch

        torch.seed()

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
