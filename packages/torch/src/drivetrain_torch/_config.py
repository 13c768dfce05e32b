"""``TorchConfig`` and ``TorchXLAConfig``: the settings of the two backends of this package."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from drivetrain import ConfigurationError
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.backends import Finding, run_python, visible_gpus
from drivetrain_torch._backend import TorchBackend, TorchXLABackend

__all__ = ["TorchConfig", "TorchXLAConfig"]

_BACKEND = re.compile(r"\w+|\w+:\w+(,\w+:\w+)*")


@dataclass(frozen=True, kw_only=True)
class TorchConfig(BackendConfig):
    """Settings of the workers' process group.

    Attributes:
        backend: the process group's backend: ``"nccl"``, ``"gloo"``, ``"mpi"``, a backend for each kind of device such
            as ``"cpu:gloo,cuda:nccl"``, or any other backend that torch supports. None selects NCCL if the workers have
            GPUs, and Gloo otherwise.
        init_method: ``"env"`` sets the environment variables ``MASTER_ADDR`` and ``MASTER_PORT`` in the train function,
            so that your own code can destroy the process group and call ``init_process_group()`` again. ``"tcp"`` does
            not set them.
        timeout_s: time limit in seconds for the workers to connect to each other, and for each collective operation.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range.

    Example:
        >>> TorchConfig(backend="gloo", timeout_s=60).init_method
        'env'
    """

    backend: str | None = None
    init_method: Literal["env", "tcp"] = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        owner = type(self).__name__
        backend: object = self.backend
        if backend is not None and not (isinstance(backend, str) and _BACKEND.fullmatch(backend)):
            raise ConfigurationError(
                f'[DT-101] {owner}(backend=...): expected a name such as "gloo" or "cpu:gloo,cuda:nccl", or None to '
                f"choose by device, got {backend!r}"
            )
        if self.init_method not in ("env", "tcp"):
            raise ConfigurationError(
                f"[DT-101] {owner}(init_method=...): expected 'env' or 'tcp', got {self.init_method!r}"
            )
        seconds: object = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ConfigurationError(
                f"[DT-101] {owner}(timeout_s=...): expected a positive number of seconds, got {seconds!r}"
            )

    def create(self) -> Backend:
        """Create the backend with these settings."""
        return TorchBackend(self.backend, self.init_method, self.timeout_s)

    @classmethod
    def diagnose(cls) -> Iterable[Finding]:
        """For ``drivetrain doctor``, check whether PyTorch can use the GPUs of this machine, if there are any."""
        if not visible_gpus() or importlib.util.find_spec("torch") is None:
            return ()
        code = "import torch; print(torch.cuda.is_available(), torch.version.cuda, torch.cuda.device_count())"
        output = run_python(code)
        detail = f"torch.cuda.is_available(), CUDA version, number of GPUs: {output}"
        if output.startswith("True"):
            return (Finding("PyTorch on GPUs", "ok", detail),)
        advice = "install a build of PyTorch for a CUDA version that the GPU driver supports"
        return (Finding("PyTorch on GPUs", "problem", detail, advice),)


@dataclass(frozen=True, kw_only=True)
class TorchXLAConfig(TorchConfig):
    """Settings of the workers' process group on XLA devices. The package ``torch_xla`` is required on every worker.

    The train function gets its device from ``torch_xla.device()``.

    Attributes:
        backend: the process group's backend, by default ``"xla"``.
        init_method: see :class:`TorchConfig`.
        timeout_s: see :class:`TorchConfig`.
    """

    backend: str | None = "xla"

    def create(self) -> Backend:
        """Create the backend with these settings."""
        return TorchXLABackend(self.backend, self.init_method, self.timeout_s)

    @classmethod
    def diagnose(cls) -> Iterable[Finding]:
        """Return no findings: the checks for CUDA do not apply to XLA devices."""
        return ()
