"""The settings of the backend."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain import Backend, BackendConfig, ConfigurationError
from drivetrain_tf._backend import TensorflowBackend, refuse_tf_config

__all__ = ["TensorflowConfig"]


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(BackendConfig):
    """How TensorFlow is set up on the workers.

    Attributes:
        intra_op_threads: threads that one operation may use; None for the CPUs of the worker, unless
            ``TF_NUM_INTRAOP_THREADS`` or your own ``tf.config.threading`` says otherwise.
        inter_op_threads: operations that may run at the same time; None likewise, with ``TF_NUM_INTEROP_THREADS``.

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
                    f"TensorflowConfig({name}=...): expected a number of threads of at least 1, or None for the "
                    "worker's "
                    f"CPUs, got {threads!r}"
                )

    def create(self) -> Backend:
        """The backend that these settings describe.

        Raises:
            ConfigurationError: ``TF_CONFIG`` is set, and workers of this machine would inherit it.
        """
        refuse_tf_config(os.environ)
        return TensorflowBackend(self.intra_op_threads, self.inter_op_threads)
