"""The TensorFlow backend: reserves a port for each worker, and puts the workers' addresses into ``TF_CONFIG``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain import ConfigurationError, FailureKind, TrainContext
from drivetrain.plugin import Backend
from drivetrain.plugin.backends import ProcessValue, WorkerGroup, reserve_port, temporary_environment, worker_threads

__all__ = ["TensorflowBackend", "refuse_tf_config"]

# Parts of the messages of errors that two bugs of Keras 3 (as of 3.15) cause in fit(), evaluate() and predict() with
# several workers. A version of Keras without the bugs does not raise these errors, so the version need not be checked.
_KERAS_3_BUGS = ("PerReplica", "Invalid reduction dimension 0 for input with 0 dimensions")

_NO_PROXY = "no_grpc_proxy"

_port = ProcessValue[int]("drivetrain_tf.port")

_last_tf_config = ProcessValue[str]("drivetrain_tf.tf_config")
"""The ``TF_CONFIG`` of this process's last session. A process may run several train functions in succession."""


@dataclass(frozen=True)
class TensorflowBackend(Backend):
    """The backend that :class:`~drivetrain_tf.TensorflowConfig` creates.

    Attributes:
        intra_op_threads: see :class:`~drivetrain_tf.TensorflowConfig`.
        inter_op_threads: see :class:`~drivetrain_tf.TensorflowConfig`.
    """

    intra_op_threads: int | None
    inter_op_threads: int | None

    name = "tensorflow"
    # Safe to import before a fork: TensorFlow starts its threads with the first operation, not on import.
    preload = ("tensorflow", "drivetrain_tf._warmup")

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Reserve a port for every worker, and return each worker's ``TF_CONFIG``. A single worker needs neither."""
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

    def classify(self, error: BaseException) -> FailureKind | None:
        """Recognize TensorFlow's exception for memory that runs out."""
        tensorflow = sys.modules.get("tensorflow")
        is_out_of_memory = tensorflow is not None and isinstance(error, tensorflow.errors.ResourceExhaustedError)
        return FailureKind.OUT_OF_MEMORY if is_out_of_memory else None

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Set ``TF_CONFIG`` and the numbers of threads.

        TensorFlow connects to the other workers later, when the train function creates a strategy.

        Raises:
            ConfigurationError: ``TF_CONFIG`` is already set; TensorFlow was used in this process before ``TF_CONFIG``
                was set; TensorFlow finds no GPU although the worker has one; or ``Model.fit`` of Keras 3 was called
                on several workers.
        """
        refuse_tf_config(os.environ)
        config = rendezvous.get("TF_CONFIG")
        if not self._set_threads() and config is not None and config != _last_tf_config.value:
            raise ConfigurationError(
                "tensorflow backend: expected a process in which TensorFlow has not run any operation, got one in "
                "which a strategy, a tensor or a dataset was created before the workers were connected, probably by a "
                "module that the train function imports. Create it in the train function"
            )
        _last_tf_config.value = config
        _check_gpus(context)
        with _environment(rendezvous):
            try:
                yield
            except ValueError as error:
                if rendezvous and any(bug in str(error) for bug in _KERAS_3_BUGS):
                    raise ConfigurationError(_KERAS_3_HELP) from error
                raise

    def _set_threads(self) -> bool:
        """Set the numbers of threads. Return False if TensorFlow has already started its threads in this process."""
        import tensorflow as tf

        threading = tf.config.threading
        intra, inter = threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()
        try:
            # First set a different number, so that TensorFlow raises an error if its threads are already running. It
            # accepts the current number even then.
            threading.set_inter_op_parallelism_threads(inter + 1)
            threading.set_inter_op_parallelism_threads(
                self.inter_op_threads or inter or _default_threads("TF_NUM_INTEROP_THREADS")
            )
            threading.set_intra_op_parallelism_threads(
                self.intra_op_threads or intra or _default_threads("TF_NUM_INTRAOP_THREADS")
            )
        except RuntimeError:
            return False
        return True


_KERAS_3_HELP = (
    "fit(), evaluate() and predict() of Keras 3 do not work under a MultiWorkerMirroredStrategy of several workers. "
    "Either train with Keras 2: pip install tf-keras, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported "
    "(in the driver, and on every node of a cluster). Or write your own training loop with strategy.run(...), "
    "which works with Keras 3. Or use one worker with all GPUs of a machine"
)


def refuse_tf_config(environment: Mapping[str, str]) -> None:
    """Check that the environment does not already describe a cluster.

    Raises:
        ConfigurationError: ``TF_CONFIG`` is set.
    """
    if "TF_CONFIG" in environment:
        raise ConfigurationError(
            "tensorflow backend: expected an environment without TF_CONFIG, which the backend sets for each worker, "
            f"got TF_CONFIG={environment['TF_CONFIG']!r}. Unset it in the environment of the driver"
        )


def _reserve_port() -> int:
    """Return the port of this process, on which TensorFlow will listen. All sessions of a process use the same port."""
    port = _port.value = _port.value or reserve_port()
    return port


def _default_threads(variable: str) -> int:
    """Return the worker's share of the CPUs of its node, which is the value of ``OMP_NUM_THREADS``.

    Return 0 if the user has set ``variable``. With 0, TensorFlow uses that variable or its own default.

    Args:
        variable: the name of TensorFlow's environment variable for this number of threads.
    """
    return (worker_threads() or 0) if variable not in os.environ else 0


def _check_gpus(context: TrainContext) -> None:
    import tensorflow as tf

    if context.worker.accelerator_ids and not tf.config.list_physical_devices("GPU"):
        raise ConfigurationError(
            f"tensorflow backend: expected TensorFlow {tf.__version__} to find the worker's GPUs "
            f"({', '.join(context.worker.accelerator_ids)}), got none. Replace a CPU build with the GPU build: "
            "pip install 'tensorflow[and-cuda]'. Or look for missing libraries in the worker's log, or remove "
            "use_gpu=True from ScalingConfig"
        )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during a ``with`` block, and restore their previous values afterwards."""
    if not variables:
        yield
        return
    # Workers must connect to each other without a proxy. gRPC ignores no_proxy if no_grpc_proxy is set, so the hosts in
    # no_proxy are copied.
    no_proxy = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    combined = {**variables, _NO_PROXY: ",".join(filter(None, [no_proxy, variables[_NO_PROXY]]))}
    with temporary_environment(combined):
        yield
