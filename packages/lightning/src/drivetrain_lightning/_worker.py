"""What the classes for both distributions have in common: this process is a worker, and in its process group.

They are mixed into classes of Lightning, before those in the order of bases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, get_context
from drivetrain_torch import get_device, get_devices

if TYPE_CHECKING:
    import torch

__all__ = ["WorkerDeepSpeedStrategy", "WorkerEnvironment", "WorkerFSDPStrategy", "WorkerStrategy", "check_strategy"]


class WorkerEnvironment:
    """A cluster environment with drivetrain's ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: drivetrain has started the workers."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 is. Nothing asks, for the process group is there already."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """A port of rank 0; see :attr:`main_address`."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """False: Lightning chooses it only where it is passed."""
        return False

    def world_size(self) -> int:
        """The number of workers."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Changes nothing."""

    def global_rank(self) -> int:
        """This worker's rank."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Changes nothing."""

    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """The rank of this worker's node."""
        return get_context().get_node_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuses them: only strategies ask that would start processes, which those of this package do not."""
        check_strategy(None)

    def teardown(self) -> None:
        """Leaves all as it is."""


class WorkerStrategy:
    """A strategy for one device per process, in a process that is there already."""

    if TYPE_CHECKING:
        accelerator: Any
        model: Any

    @property
    def root_device(self) -> torch.device:
        """The device that this worker trains on."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data is this worker's."""
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}

    @property
    def launcher(self) -> None:
        """None: no process is to be started."""
        return None

    def setup_environment(self) -> None:
        """Checks that the trainer fits the worker, which matters where ``prepare_trainer`` was not called."""
        check_strategy(self)
        self._handler = signal.getsignal(signal.SIGTERM)
        self._setup_environment()

    def _setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Called when training starts."""
        super().on_train_start()  # type: ignore[misc]
        self._give_sigterm_back()

    def on_validation_start(self) -> None:
        """Called when validation starts."""
        super().on_validation_start()  # type: ignore[misc]
        self._give_sigterm_back()

    def on_test_start(self) -> None:
        """Called when testing starts."""
        super().on_test_start()  # type: ignore[misc]
        self._give_sigterm_back()

    def on_predict_start(self) -> None:
        """Called when predicting starts."""
        super().on_predict_start()  # type: ignore[misc]
        self._give_sigterm_back()

    def _give_sigterm_back(self) -> None:
        """Undoes that Lightning handles SIGTERM, with a collective operation amid others.

        drivetrain tells all ranks of it at the same step, unless it finds a handler other than its own.
        """
        if threading.current_thread() is threading.main_thread() and self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)


class WorkerFSDPStrategy(WorkerStrategy):
    """FSDP, on CPUs as well."""

    if TYPE_CHECKING:
        cpu_offload: Any
        mixed_precision_config: Any
        precision_plugin: Any
        sharding_strategy: Any
        kwargs: dict[str, Any]

    def __init__(self, *args: Any, state_dict_type: str = "full", **kwargs: Any) -> None:
        super().__init__(*args, state_dict_type=state_dict_type, **kwargs)  # type: ignore[call-arg]
        self._gathers = state_dict_type == "full"

    def setup(self, trainer: Any) -> None:
        """Wraps the model, without a GPU ahead of Lightning, which would tell FSDP to look for one."""
        if self.root_device.type != "cpu":
            super().setup(trainer)  # type: ignore[misc]
            return
        if self._gathers:
            raise ConfigurationError(
                "RayFSDPStrategy: expected sharded checkpoints on workers without GPUs, got "
                "state_dict_type='full', with "
                "which torch crashes there: pass RayFSDPStrategy(state_dict_type='sharded')"
            )
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.model = FullyShardedDataParallel(self.precision_plugin.convert_module(self.model), **self._wrapping())
        policy = self.kwargs.pop("auto_wrap_policy", None)  # has been followed
        super().setup(trainer)  # type: ignore[misc]
        if policy is not None:
            self.kwargs["auto_wrap_policy"] = policy

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Has ``wrap()`` in ``configure_model`` wrap layers for this worker's device."""
        if self.root_device.type != "cpu":
            with super().model_sharded_context():  # type: ignore[misc]
                yield
            return
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import enable_wrap

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._wrapping()):
            yield

    def _wrapping(self) -> dict[str, Any]:
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": self.root_device,
            **self.kwargs,
        }


class WorkerDeepSpeedStrategy(WorkerStrategy):
    """DeepSpeed, on CPUs as well."""

    if TYPE_CHECKING:

        def set_world_ranks(self) -> None: ...

    @property
    def root_device(self) -> torch.device:
        """The device that this worker trains on, with the number that DeepSpeed asks for on CPUs too."""
        import torch

        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def _setup_environment(self) -> None:
        # Not Lightning's, which refuses CPUs.
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Has DeepSpeed use the process group that is there."""
        import deepspeed

        self.set_world_ranks()
        deepspeed.init_distributed(auto_mpi_discovery=False)


def check_strategy(strategy: object) -> None:
    """Refuses a strategy, with what its trainer has given it, that cannot train on this worker.

    Args:
        strategy: any; None for one that is not known, and none of this package.

    Raises:
        ConfigurationError: see :func:`~drivetrain_lightning.prepare_trainer`.
    """
    import torch

    if not isinstance(strategy, WorkerStrategy):
        other = "another" if strategy is None else type(strategy).__name__
        raise ConfigurationError(
            f"a Trainer in a train function: expected one of drivetrain_lightning's strategies, got {other}: pass "
            "Trainer(strategy=RayDDPStrategy()), RayFSDPStrategy or RayDeepSpeedStrategy"
        )
    environment = getattr(strategy, "cluster_environment", None)
    if not isinstance(environment, WorkerEnvironment):
        raise ConfigurationError(
            "a Trainer in a train function: expected drivetrain_lightning's cluster environment, got "
            f"{type(environment).__name__}: pass Trainer(plugins=[RayLightningEnvironment()])"
        )
    own, given = get_devices(), list(getattr(strategy, "parallel_devices", None) or ())
    device, found = own[0], f"got {', '.join(map(str, given))}"
    if given and given[0].type != device.type:
        accelerator, what = ("cpu", "GPUs") if device.type == "cpu" else ("auto", "none")
        raise ConfigurationError(
            f"the Trainer: expected to train on this worker's {device.type.upper()}, {found}: pass "
            f"Trainer(accelerator={accelerator!r}), or ask for {what} by ScalingConfig(use_gpu={device.type == 'cpu'})"
        )
    are_own = device in given and len(given) <= len(own) and set(given) <= set(own)
    are_all_visible = device.type == "cuda" and len(given) == torch.cuda.device_count()  # what "auto" takes
    if given and not are_own and not are_all_visible:
        raise ConfigurationError(
            f"the Trainer: expected the devices of this worker, which trains on {device}, {found}: pass "
            "Trainer(devices='auto'); the number of processes is that of ScalingConfig(num_workers=...)"
        )
