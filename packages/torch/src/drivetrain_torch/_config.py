"""The settings of the two backends."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from drivetrain import Backend, BackendConfig, ConfigurationError
from drivetrain.plugin import Finding, run_python, visible_gpus
from drivetrain_torch._backend import TorchBackend, TorchXLABackend

__all__ = ["TorchConfig", "TorchXLAConfig"]

_BACKEND = re.compile(r"\w+|\w+:\w+(,\w+:\w+)*")


@dataclass(frozen=True, kw_only=True)
class TorchConfig(BackendConfig):
    """How the workers' process group is set up.

    Attributes:
        backend: ``"nccl"``, ``"gloo"``, ``"mpi"``, one for each kind of device such as ``"cpu:gloo,cuda:nccl"``, or
            any other that torch knows; None takes NCCL where the workers have GPUs, and Gloo otherwise.
        init_method: ``"env"`` also sets ``MASTER_ADDR`` and ``MASTER_PORT`` in the train function, so that code of
            your own can call ``init_process_group()`` after it has destroyed the group; ``"tcp"`` sets no variables.
        timeout_s: seconds that workers may take to find each other, and that one collective operation may take.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.

    Example:
        >>> TorchConfig(backend="gloo", timeout_s=60).init_method
        'env'
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        owner = type(self).__name__
        backend: object = self.backend
        if backend is not None and not (isinstance(backend, str) and _BACKEND.fullmatch(backend)):
            raise ConfigurationError(
                f'{owner}(backend=...): expected a name such as "gloo" or "cpu:gloo,cuda:nccl", or None to choose by '
                f"device, got {backend!r}"
            )
        if self.init_method not in ("env", "tcp"):
            raise ConfigurationError(f"{owner}(init_method=...): expected 'env' or 'tcp', got {self.init_method!r}")
        seconds: object = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ConfigurationError(f"{owner}(timeout_s=...): expected a positive number of seconds, got {seconds!r}")

    def create(self) -> Backend:
        """The backend that these settings describe."""
        return TorchBackend(self.backend, self.init_method, self.timeout_s)

    @classmethod
    def diagnose(cls) -> Iterable[Finding]:
        """The check of ``drivetrain doctor``: whether PyTorch can use the GPUs of this machine, if it has any."""
        if not visible_gpus() or importlib.util.find_spec("torch") is None:
            return ()
        code = "import torch; print(torch.cuda.is_available(), torch.version.cuda, torch.cuda.device_count())"
        output = run_python(code)
        found = f"is available, CUDA, devices: {output}"
        if output.startswith("True"):
            return (Finding("PyTorch on GPUs", "ok", found),)
        advice = "install a PyTorch that was built for CUDA, and for a version that the driver has"
        return (Finding("PyTorch on GPUs", "problem", found, advice),)


@dataclass(frozen=True, kw_only=True)
class TorchXLAConfig(TorchConfig):
    """How the workers' process group is set up on XLA devices, with the package ``torch_xla`` on every worker.

    The train function takes its device from ``torch_xla.device()``.

    Attributes:
        backend: ``"xla"``.
        init_method: see :class:`TorchConfig`.
        timeout_s: see :class:`TorchConfig`.
    """

    backend: str | None = "xla"

    def create(self) -> Backend:
        """The backend that these settings describe."""
        return TorchXLABackend(self.backend, self.init_method, self.timeout_s)

    @classmethod
    def diagnose(cls) -> Iterable[Finding]:
        """No checks: those of CUDA do not apply to XLA devices."""
        return ()
