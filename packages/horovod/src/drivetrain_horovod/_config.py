"""``HorovodConfig``: the settings of the backend."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from drivetrain import Backend, BackendConfig, ConfigurationError
from drivetrain_horovod._backend import HorovodBackend
from drivetrain_horovod._built import find_build

__all__ = ["HorovodConfig"]


@dataclass(frozen=True, kw_only=True)
class HorovodConfig(BackendConfig):
    """How Horovod is set up on the workers.

    Attributes:
        nics: names of network interfaces, such as ``{"eth0"}``, of which each worker uses the first, in alphabetical
            order, that it has; None uses the loopback on one machine, and elsewhere the interface of the address at
            which the other workers reach it.
        verbose: what Horovod's core logs: 0 errors, 1 warnings, 2 what it does, 3 all. A ``HOROVOD_LOG_LEVEL`` in the
            workers' environment goes before it.
        elastic: when a rank is lost, the others stay: they go back to their last commit, and go on with a new process
            in its place. The train function wants ``hvd.elastic.run``, the driver Horovod, and the run a
            ``FailureConfig(max_failures=...)``.
        elastic_timeout_s: in elastic mode, seconds that ``hvd.init()`` may wait for a new process, and one operation of
            Gloo may take. Where there are more than two ranks, one may wait for another that has noticed a loss first,
            and notices it itself when its operation has taken so long.
        timeout_s: seconds that ``hvd.init()`` may wait for the other ranks, and that one operation of Gloo may take.
        placement_group_timeout_s: taken, and without effect: ``RunConfig(start_timeout_s=...)`` bounds the wait for
            resources.
        key: taken, and without effect: it is for services of Horovod's launcher, which drivetrain does without.
        ssh_port: taken, and without effect: drivetrain starts no worker by SSH.
        ssh_identity_file: see ``ssh_port``.
        ssh_str: see ``ssh_port``.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.

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
        """The backend that these settings describe."""
        with_torch = "torch" in (find_build() or {})
        return HorovodBackend(
            nics=None if self.nics is None else tuple(sorted(self.nics)),
            verbose=self.verbose,
            survives_losses=self.elastic,
            timeout_s=math.ceil(self.timeout_s),
            operation_timeout_s=math.ceil(self.elastic_timeout_s if self.elastic else self.timeout_s),
            preload=("horovod.torch",) if with_torch else (),
            # What can be compiled, such as the first optimizer, imports torch's compiler.
            warmup=("sympy", "drivetrain_horovod._warmup") if with_torch else (),
        )


def _are_names(nics: object) -> bool:
    return (
        isinstance(nics, Collection)
        and not isinstance(nics, str)
        and len(nics) > 0
        and all(isinstance(name, str) and name for name in nics)
    )
