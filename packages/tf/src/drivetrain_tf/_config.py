"""The configuration of the TensorFlow backend."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain import ConfigurationError
from drivetrain.plugin import Backend, BackendConfig
from drivetrain_tf._backend import TensorflowBackend, refuse_tf_config

__all__ = ["TensorflowConfig"]


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(BackendConfig):
    """Configuration of TensorFlow on the workers.

    Attributes:
        intra_op_threads: the number of threads that one operation may use. None for the worker's number of CPUs, unless
            ``TF_NUM_INTRAOP_THREADS`` or a call of ``tf.config.threading`` in your code sets another number.
        inter_op_threads: the number of operations that may run at the same time. None for the worker's number of CPUs,
            unless ``TF_NUM_INTEROP_THREADS`` or a call of ``tf.config.threading`` in your code sets another number.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> TensorflowConfig(intra_op_threads=4).inter_op_threads is None
        True
    """

    intra_op_threads: int | None = None
    inter_op_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("intra_op_threads", "inter_op_threads"):
            threads: object = getattr(self, name)
            if threads is not None and (type(threads) is not int or threads < 1):
                raise ConfigurationError(
                    f"TensorflowConfig({name}=...): expected a number of threads >= 1, or None for the worker's CPUs, "
                    f"got {threads!r}"
                )

    def create(self) -> Backend:
        """Return the backend with this configuration.

        Raises:
            ConfigurationError: ``TF_CONFIG`` is set in this process, so workers on this machine would inherit it.
        """
        refuse_tf_config(os.environ)
        return TensorflowBackend(self.intra_op_threads, self.inter_op_threads)
