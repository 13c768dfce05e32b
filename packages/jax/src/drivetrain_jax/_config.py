"""The configuration of the JAX backend."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain import ConfigurationError
from drivetrain.plugin import Backend, BackendConfig
from drivetrain_jax._backend import PLATFORMS, JaxBackend

__all__ = ["JaxConfig"]


@dataclass(frozen=True, kw_only=True)
class JaxConfig(BackendConfig):
    """Configuration of JAX on the workers.

    Attributes:
        platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"`` to use only these devices, and to fail if there are
            none. None lets JAX choose: TPUs or GPUs if its package for them is installed, otherwise CPUs.

    Raises:
        ConfigurationError: the platform is unknown.

    Example:
        >>> JaxConfig(platform="cpu").create().environment
        {'JAX_PLATFORMS': 'cpu'}
    """

    platform: str | None = None

    def __post_init__(self) -> None:
        if self.platform not in (None, *PLATFORMS):
            raise ConfigurationError(
                f"JaxConfig(platform=...): expected one of {', '.join(map(repr, PLATFORMS))}, or None, got "
                f"{self.platform!r}"
            )

    def create(self) -> Backend:
        """Create the backend with this configuration."""
        return JaxBackend(self.platform, {"JAX_PLATFORMS": self.platform} if self.platform else {})
