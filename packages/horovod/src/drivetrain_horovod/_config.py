"""``HorovodConfig``: the settings of the backend."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from drivetrain import ConfigurationError
from drivetrain.plugin import Backend, BackendConfig
from drivetrain_horovod._backend import HorovodBackend
from drivetrain_horovod._built import find_build

__all__ = ["HorovodConfig"]


@dataclass(frozen=True, kw_only=True)
class HorovodConfig(BackendConfig):
    """Settings of Horovod on the workers.

    Attributes:
        nics: the names of network interfaces, such as ``{"eth0"}``. In alphabetical order, each worker uses the first
            of these interfaces that its node has. With None, the workers use the loopback interface if they all run on
            one machine. Otherwise, each worker uses the interface at whose address the other workers reach it.
        verbose: the log level of Horovod's core: 0 for errors, 1 for warnings, 2 for information, 3 for everything. A
            ``HOROVOD_LOG_LEVEL`` in the workers' environment takes precedence.
        elastic: when a rank is lost, keep the processes of the other ranks. These ranks return to their last commit,
            and continue with a new process in place of the lost process. This requires ``hvd.elastic.run`` in the train
            function, Horovod in the driver's environment, and ``FailureConfig(max_failures=...)``.
        elastic_timeout_s: in elastic mode, the time limit in seconds for ``hvd.init()`` to wait for a new process, and
            for each operation of Gloo. With more than two ranks, a rank may be in an operation with another rank that
            has already noticed a loss. The first rank notices the loss only when its operation times out.
        timeout_s: time limit in seconds for ``hvd.init()`` to wait for the other ranks, and for each operation of Gloo.
            In elastic mode, it is instead the time limit for the surviving ranks to wait for each other after a loss.
        placement_group_timeout_s: accepted but ignored. ``RunConfig(start_timeout_s=...)`` limits the wait for
            resources.
        key: accepted but ignored. It is for services of Horovod's launcher, which drivetrain does not use.
        ssh_port: accepted but ignored. drivetrain does not start workers by SSH.
        ssh_identity_file: see ``ssh_port``.
        ssh_str: see ``ssh_port``.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range.

    Example:
        >>> HorovodConfig(nics={"eth0"}).timeout_s
        300
    """

    nics: Collection[str] | None = None
    verbose: int = 1
    elastic: bool = False
    elastic_timeout_s: float = 30
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None

    def __post_init__(self) -> None:
        nics: object = self.nics
        if nics is not None and not _are_names(nics):
            raise ConfigurationError(
                'HorovodConfig(nics=...): expected names of network interfaces such as {"eth0"}, or None to choose by '
                f"address, got {nics!r}"
            )
        if type(self.verbose) is not int or self.verbose < 0:
            raise ConfigurationError(f"HorovodConfig(verbose=...): expected 0, 1, 2 or 3, got {self.verbose!r}")
        if type(self.elastic) is not bool:
            raise ConfigurationError(f"HorovodConfig(elastic=...): expected True or False, got {self.elastic!r}")
        for name in ("timeout_s", "elastic_timeout_s", "placement_group_timeout_s"):
            seconds: object = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds < math.inf:
                raise ConfigurationError(
                    f"HorovodConfig({name}=...): expected a number of seconds of at least 1, got {seconds!r}"
                )

    def create(self) -> Backend:
        """Create the backend with these settings."""
        with_torch = "torch" in (find_build() or {})
        return HorovodBackend(
            nics=None if self.nics is None else tuple(sorted(self.nics)),
            verbose=self.verbose,
            survives_losses=self.elastic,
            timeout_s=math.ceil(self.timeout_s),
            operation_timeout_s=math.ceil(self.elastic_timeout_s if self.elastic else self.timeout_s),
            preload=("horovod.torch",) if with_torch else (),
            # The first optimizer that a process creates imports torch's whole compiler.
            warmup=("sympy", "drivetrain_horovod._warmup") if with_torch else (),
        )


def _are_names(nics: object) -> bool:
    return (
        isinstance(nics, Collection)
        and not isinstance(nics, str)
        and len(nics) > 0
        and all(isinstance(name, str) and name for name in nics)
    )
