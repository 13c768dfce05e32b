"""Tells TensorFlow on each worker where the others are: in ``TF_CONFIG``, with ports that are reserved for it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain import Backend, ConfigurationError, TrainContext, WorkerGroup

__all__ = ["TensorflowBackend", "refuse_tf_config"]

# What Keras 3 (3.15) says of its two faults in fit(), evaluate() and predict() with several workers. Where it has been
# mended nothing is said, and nothing is refused.
_KERAS_3_FAULTS = ("PerReplica", "Invalid reduction dimension 0 for input with 0 dimensions")

_NO_PROXY = "no_grpc_proxy"

_reserved: socket.socket | None = None
"""What keeps this process's port for it, until it ends."""

_told: str | None = None
"""The workers that TensorFlow knows of in this process, which may run one train function after another."""


@dataclass(frozen=True)
class TensorflowBackend(Backend):
    """What :class:`~drivetrain_tf.TensorflowConfig` describes.

    Attributes:
        intra_op_threads: see there.
        inter_op_threads: see there.
    """

    intra_op_threads: int | None
    inter_op_threads: int | None

    name = "tensorflow"
    # It starts its threads with its first operation, not when it is imported.
    preload = ("tensorflow", "drivetrain_tf._warmup")

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Has every worker reserve a port on its own machine; a worker that is alone needs none."""
        if len(group.workers) == 1:
            return [{}]
        hosts = [worker.ip for worker in group.workers]
        addresses = [f"{host}:{port}" for host, port in zip(hosts, group.run(_reserve_port), strict=True)]
        return [
            {
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker.rank}}
                ),
                _NO_PROXY: ",".join(dict.fromkeys(hosts)),
            }
            for worker in group.workers
        ]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Sets ``TF_CONFIG`` and the threads; TensorFlow connects when the train function makes a strategy.

        Raises:
            ConfigurationError: ``TF_CONFIG`` is set already; TensorFlow has been used in this process before it could
                know of the other workers; it sees no GPU though the worker has one; or ``Model.fit`` of Keras 3 was
                called on several workers.
        """
        global _told
        refuse_tf_config(os.environ)
        config = rendezvous.get("TF_CONFIG")
        if not self._set_threads() and config is not None and config != _told:
            raise ConfigurationError(
                "the tensorflow backend: expected a process in which TensorFlow has not computed anything yet, got one "
                "in which a strategy, a tensor or a dataset was made before the workers know of each other, when a "
                "module of the train function was imported: make it in the train function"
            )
        _told = config
        _check_gpus(context)
        with _environment(rendezvous):
            try:
                yield
            except ValueError as error:
                if rendezvous and any(fault in str(error) for fault in _KERAS_3_FAULTS):
                    raise ConfigurationError(_EXPLANATION) from error
                raise

    def _set_threads(self) -> bool:
        """Sets the threads; False where TensorFlow has computed something, and so has threads, in this process."""
        import tensorflow as tf

        threading = tf.config.threading
        intra, inter = threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()
        try:
            threading.set_inter_op_parallelism_threads(inter + 1)  # as the number that it has is never refused
            threading.set_inter_op_parallelism_threads(
                self.inter_op_threads or inter or _threads_unless("TF_NUM_INTEROP_THREADS")
            )
            threading.set_intra_op_parallelism_threads(
                self.intra_op_threads or intra or _threads_unless("TF_NUM_INTRAOP_THREADS")
            )
        except RuntimeError:
            return False
        return True


_EXPLANATION = (
    "fit(), evaluate() and predict() of Keras 3 do not work under a MultiWorkerMirroredStrategy of several workers. "
    "Either train with Keras 2: pip install tf-keras, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported "
    "(in the driver, and on every node of a cluster); or write the training loop yourself, with strategy.run(...), "
    "which works with Keras 3; or use one worker, with all GPUs of a machine"
)


def refuse_tf_config(environment: Mapping[str, str]) -> None:
    """Refuses to go on where another description of the cluster would get in the way.

    Raises:
        ConfigurationError: ``TF_CONFIG`` is set.
    """
    if "TF_CONFIG" in environment:
        raise ConfigurationError(
            "the tensorflow backend sets TF_CONFIG for each worker itself, got it set already "
            f"({environment['TF_CONFIG']!r}): unset it in the environment that drivetrain is started in"
        )


def _reserve_port() -> int:
    """A port that is free, and that nothing else is given before TensorFlow listens on it.

    TensorFlow wants a number and binds it itself, much later. Linux lets it bind a port that is bound by a socket which
    does not listen, if both say SO_REUSEADDR as TensorFlow's does, and keeps that port from everybody who asks for any.
    """
    global _reserved
    if _reserved is None:
        _reserved = socket.socket()
        _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.bind(("", 0))
    port: int = _reserved.getsockname()[1]
    return port


def _threads_unless(variable: str) -> int:
    """The worker's share of its node's CPUs, as the runtime says; 0, TensorFlow's own choice, if a variable is set."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdecimal() and variable not in os.environ else 0


def _check_gpus(context: TrainContext) -> None:
    import tensorflow as tf

    if context.worker.accelerator_ids and not tf.config.list_physical_devices("GPU"):
        raise ConfigurationError(
            f"this worker has the GPUs {', '.join(context.worker.accelerator_ids)}, and TensorFlow {tf.__version__} "
            "finds none: run pip install 'tensorflow[and-cuda]' in place of a build for CPUs, look for libraries that "
            "it misses in the worker's log, or take use_gpu=True out of ScalingConfig"
        )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables of a worker that is not alone, and puts back what was there."""
    if not variables:
        yield
        return
    # Workers talk to each other directly, and gRPC reads one variable only of those that say so.
    told = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    given = {**variables, _NO_PROXY: ",".join(filter(None, [told, variables[_NO_PROXY]]))}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
