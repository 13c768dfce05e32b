"""The JAX backend: connects the workers with ``jax.distributed``, whose coordination service runs in process 0."""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain import ConfigurationError, FailureKind, ScalingConfig, TrainContext
from drivetrain.plugin import Backend, WorkerInfo
from drivetrain.plugin.backends import ProcessValue, WorkerGroup, node_accelerators, reserve_port, temporary_environment
from drivetrain_jax._tpu import process_ids, tpu_variables

__all__ = ["PLATFORMS", "JaxBackend"]

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_LOST = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): |[A-Z_]+: .*(Gloo|NCCL).*"
    r"(closed by peer|reset by peer|Broken pipe|refused|Timed? ?out|remote|system error)",
    re.DOTALL,
)
# JAX ends the processes that wait for another one to leave for longer than this. Ranks may return at any time.
_LEAVE_S = 30 * 24 * 3600
_MARGIN_S = 60
_was_connected = ProcessValue[bool]("drivetrain_jax.was_connected")


@dataclass(frozen=True)
class JaxBackend(Backend):
    """The backend that :class:`~drivetrain_jax.JaxConfig` creates.

    Attributes:
        platform: see :class:`~drivetrain_jax.JaxConfig`.
        environment: the variable that selects the platform. JAX reads it when it is imported.
    """

    platform: str | None
    environment: Mapping[str, str] = field(default_factory=dict)

    name = "jax"
    # Safe to import before a fork: JAX starts its threads when a device is first used, not on import.
    preload = ("jax", "jax.numpy")

    def validate(self, scaling: ScalingConfig) -> None:
        """Check that the workers have whole GPUs if JAX is to use GPUs, and none otherwise."""
        gpus = scaling.num_gpus_per_worker
        if self.platform is not None and (gpus > 0) != (self.platform in ("cuda", "rocm")):
            raise ConfigurationError(
                f"JaxConfig(platform={self.platform!r}): expected {'no' if gpus else 'at least one'} GPU per worker, "
                f"got {gpus:g}. Set use_gpu={not gpus} in ScalingConfig, or choose another platform"
            )
        if gpus % 1:
            raise ConfigurationError(
                f"the jax backend: expected whole GPUs for each worker, got {gpus:g}. Set "
                'resources_per_worker={"GPU": 1} in ScalingConfig'
            )

    def rank_environment(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
        """Let the workers of a node see each other's GPUs. :meth:`session` selects a worker's own GPUs."""
        return {"CUDA_VISIBLE_DEVICES": node_accelerators(workers)[worker.rank]} if worker.accelerator_ids else {}

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Choose the process ids and the coordinator's address. A single worker needs neither."""
        on_tpu = self.platform in (None, "tpu")
        found = group.run(tpu_variables) if on_tpu else [{} for _ in group.workers]
        ids = process_ids(found)
        if len(ids) == 1:
            return [{}]
        first = ids.index(0)
        (port,) = group.run(reserve_port, ranks=[first])
        address = f"{group.workers[first].ip}:{port}"
        timeout_s = int(group.attempt.start_timeout_s) + _MARGIN_S  # the driver times out first; its error says more
        return [
            {"address": address, "process": str(number), "gpus": gpus, "timeout_s": str(timeout_s)}
            for number, gpus in zip(ids, node_accelerators(group.workers), strict=True)
        ]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Connect to the other workers, and disconnect when all have returned.

        A worker whose train function raises an exception does not disconnect, because it would have to wait for the
        other workers.

        Raises:
            ConfigurationError: JAX was used before the workers were connected, or finds none of the worker's GPUs.
        """
        import jax

        if rendezvous:
            _connect(context, rendezvous)
        if context.worker.accelerator_ids and jax.default_backend() == "cpu":
            raise ConfigurationError(
                f"the jax backend: expected JAX {jax.__version__} to find the worker's GPUs "
                f"({', '.join(context.worker.accelerator_ids)}), got none. Install JAX for them, such as "
                "pip install 'jax[cuda12]', or remove use_gpu=True from ScalingConfig"
            )
        yield
        if rendezvous:
            jax.distributed.shutdown()

    def classify(self, error: BaseException) -> FailureKind | None:
        """Recognize memory that runs out, and lost connections to other workers, by the status that begins a message.

        JAX raises a ``ValueError`` for a failed collective operation on CPUs.
        """
        jax = sys.modules.get("jax")
        if jax is None or not isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
            return None
        if isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED: "):
            return FailureKind.OUT_OF_MEMORY
        return FailureKind.INFRASTRUCTURE if _LOST.match(str(error)) else None


def _connect(context: TrainContext, rendezvous: Mapping[str, str]) -> None:
    import jax
    from jax.extend.backend import clear_backends

    if _was_connected.value:  # an earlier run in this process, which JAX's devices still refer to
        clear_backends()
    visible = rendezvous["gpus"].split(",")
    host = rendezvous["address"].rpartition(":")[0]
    handler = signal.getsignal(signal.SIGTERM)
    optional = {"shutdown_timeout_seconds": _LEAVE_S}
    known = inspect.signature(jax.distributed.initialize).parameters
    try:
        with temporary_environment({"no_grpc_proxy": host} if urllib.request.getproxies_environment() else {}):
            jax.distributed.initialize(
                coordinator_address=rendezvous["address"],
                coordinator_bind_address=rendezvous["address"],
                num_processes=context.get_world_size(),
                process_id=int(rendezvous["process"]),
                local_device_ids=[visible.index(gpu) for gpu in context.worker.accelerator_ids] or None,
                cluster_detection_method="deactivate",
                initialization_timeout=int(rendezvous["timeout_s"]),
                **{name: value for name, value in optional.items() if name in known},
            )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise ConfigurationError(
            "the jax backend: expected a process in which JAX has not used a device, got one in which it has, probably "
            "because a module that the train function imports creates an array. Create it in the train function"
        ) from error
    _was_connected.value = True
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)  # JAX has replaced it by its own, for its notices of preemption
