"""Strategies and an environment for workers in which the process group exists already.

``lightning`` and ``pytorch_lightning`` share this code. The classes are mixins for classes of Lightning. In a list of
base classes, the mixin comes before Lightning's class.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, get_context
from drivetrain_lightning._resume import Resumption
from drivetrain_torch import get_device, get_devices

if TYPE_CHECKING:
    import torch

__all__ = ["WorkerDeepSpeedStrategy", "WorkerEnvironment", "WorkerFSDPStrategy", "WorkerStrategy", "check_strategy"]


class WorkerEnvironment:
    """A cluster environment that returns drivetrain's ranks and number of workers."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: drivetrain has started the workers."""
        return True

    @property
    def main_address(self) -> str:
        """Return the address of rank 0. It is not used, because the process group exists already."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Return a port of rank 0. Like :attr:`main_address`, it is not used."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return False, so that Lightning uses this environment only if it is passed to the ``Trainer``."""
        return False

    def world_size(self) -> int:
        """Return the number of workers."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: drivetrain sets the world size."""

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: drivetrain sets the ranks."""

    def local_rank(self) -> int:
        """Return this worker's rank on its node."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Return the rank of this worker's node."""
        return get_context().get_node_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse another number of processes than that of the workers.

        Only strategies that can start processes call this: those of Lightning in a ``Fabric`` or in a ``Trainer``.
        """
        workers = get_context().get_world_size()
        if num_devices * num_nodes != workers:
            raise ConfigurationError(
                f"[DT-760] Lightning: expected one process for each of the {workers} workers, got "
                f"devices={num_devices} and num_nodes={num_nodes}. Pass Trainer(strategy=RayDDPStrategy()), "
                "RayFSDPStrategy or RayDeepSpeedStrategy, or create Fabric() without devices and num_nodes"
            )

    def teardown(self) -> None:
        """Do nothing."""


class WorkerStrategy:
    """A strategy for processes that are already running, with one device per process."""

    if TYPE_CHECKING:
        accelerator: Any
        lightning_module: Any
        model: Any

    @property
    def root_device(self) -> torch.device:
        """Return the device that this worker trains on."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the arguments of a ``DistributedSampler`` that select this worker's part of the data."""
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}

    @property
    def launcher(self) -> None:
        """Return None: no process needs to be started."""
        return None

    def setup_environment(self) -> None:
        """Check the trainer, in case ``prepare_trainer`` was not called, and set up the environment."""
        check_strategy(self)
        self._handler = signal.getsignal(signal.SIGTERM)
        self._setup_environment()

    def _setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]

    def process_dataloader(self, dataloader: object) -> object:
        """Make the position of a loader for the training a part of the checkpoints that the callback reports."""
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks if trainer.training else ():
            resumption = getattr(callback, "resumption", None)
            if isinstance(resumption, Resumption):
                dataloader = resumption.add_loader(dataloader, trainer.fit_loop.epoch_progress.current.processed)
        return dataloader

    def on_train_start(self) -> None:
        """Restore drivetrain's SIGTERM handler. Called when training starts."""
        super().on_train_start()  # type: ignore[misc]
        self._restore_sigterm_handler()

    def on_validation_start(self) -> None:
        """Restore drivetrain's SIGTERM handler. Called when validation starts."""
        super().on_validation_start()  # type: ignore[misc]
        self._restore_sigterm_handler()

    def on_test_start(self) -> None:
        """Restore drivetrain's SIGTERM handler. Called when testing starts."""
        super().on_test_start()  # type: ignore[misc]
        self._restore_sigterm_handler()

    def on_predict_start(self) -> None:
        """Restore drivetrain's SIGTERM handler. Called when prediction starts."""
        super().on_predict_start()  # type: ignore[misc]
        self._restore_sigterm_handler()

    def _restore_sigterm_handler(self) -> None:
        """Restore drivetrain's SIGTERM handler, which Lightning has replaced.

        Lightning's handler would run a collective operation at any moment, even between collective operations of the
        training. drivetrain's handler makes all ranks receive the notice at the same step.
        """
        if threading.current_thread() is threading.main_thread() and self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)


class WorkerFSDPStrategy(WorkerStrategy):
    """FSDP, with support for CPUs."""

    if TYPE_CHECKING:
        cpu_offload: Any
        mixed_precision_config: Any
        precision_plugin: Any
        sharding_strategy: Any
        kwargs: dict[str, Any]

    def __init__(self, *args: Any, state_dict_type: str = "full", **kwargs: Any) -> None:
        super().__init__(*args, state_dict_type=state_dict_type, **kwargs)  # type: ignore[call-arg]
        self._saves_full_state = state_dict_type == "full"

    def setup(self, trainer: Any) -> None:
        """Wrap the model.

        On a worker without a GPU, this method wraps the model itself: with Lightning's own wrapping, FSDP would look
        for a GPU.
        """
        if self.root_device.type != "cpu":
            super().setup(trainer)  # type: ignore[misc]
            return
        if self._saves_full_state:
            raise ConfigurationError(
                "RayFSDPStrategy: expected state_dict_type='sharded' on workers without GPUs, got 'full', with which "
                "torch crashes there. Pass RayFSDPStrategy(state_dict_type='sharded')"
            )
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.model = FullyShardedDataParallel(self.precision_plugin.convert_module(self.model), **self._wrapping())
        policy = self.kwargs.pop("auto_wrap_policy", None)  # the wrapper above has already applied it
        super().setup(trainer)  # type: ignore[misc]
        if policy is not None:
            self.kwargs["auto_wrap_policy"] = policy

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Make ``wrap()`` in ``configure_model`` wrap layers for this worker's device."""
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
    """DeepSpeed, with support for CPUs."""

    if TYPE_CHECKING:

        def set_world_ranks(self) -> None: ...

    @property
    def root_device(self) -> torch.device:
        """Return the device that this worker trains on. A CPU device gets an index, which DeepSpeed requires."""
        import torch

        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def _setup_environment(self) -> None:
        # Lightning's DeepSpeedStrategy.setup_environment() refuses CPUs.
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Make DeepSpeed use the existing process group."""
        import deepspeed

        self.set_world_ranks()
        deepspeed.init_distributed(auto_mpi_discovery=False)


def check_strategy(strategy: object) -> None:
    """Check that a strategy can train on this worker with the devices and the environment of its trainer.

    Args:
        strategy: the strategy of a trainer.

    Raises:
        ConfigurationError: see :func:`~drivetrain_lightning.prepare_trainer`.
    """
    import torch

    if not isinstance(strategy, WorkerStrategy):
        raise ConfigurationError(
            f"Trainer(strategy=...): expected a strategy of drivetrain_lightning, got {type(strategy).__name__}. Pass "
            "Trainer(strategy=RayDDPStrategy()), RayFSDPStrategy or RayDeepSpeedStrategy"
        )
    environment = getattr(strategy, "cluster_environment", None)
    if not isinstance(environment, WorkerEnvironment):
        raise ConfigurationError(
            "Trainer(plugins=...): expected the cluster environment of drivetrain_lightning, got "
            f"{type(environment).__name__}. Pass Trainer(plugins=[RayLightningEnvironment()])"
        )
    own, given = get_devices(), list(getattr(strategy, "parallel_devices", None) or ())
    device, described = own[0], ", ".join(map(str, given))
    if given and given[0].type != device.type:
        accelerator = "cpu" if device.type == "cpu" else "auto"
        raise ConfigurationError(
            f"Trainer(accelerator=...): expected to train on this worker's {device.type.upper()}, got {described}. "
            f"Pass Trainer(accelerator={accelerator!r}), or set ScalingConfig(use_gpu={device.type == 'cpu'})"
        )
    are_own = device in given and len(given) <= len(own) and set(given) <= set(own)
    are_all_visible = device.type == "cuda" and len(given) == torch.cuda.device_count()  # as with devices="auto"
    if given and not are_own and not are_all_visible:
        raise ConfigurationError(
            f"Trainer(devices=...): expected the devices of this worker, which trains on {device}, got {described}. "
            "Pass Trainer(devices='auto'), and set the number of processes with ScalingConfig(num_workers=...)"
        )
