"""A runtime that keeps the group of a run for the next one, as long as that would get nothing else from a new group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drivetrain._runtimes.base import Group, GroupSpec, Runtime

if TYPE_CHECKING:
    from drivetrain._hooks.context import WorkerInfo
    from drivetrain.config import ScalingConfig

__all__ = ["WarmRuntime"]


class WarmRuntime(Runtime):
    """Lends one group to run after run.

    A group whose ranks have all returned rests until the next run wants one. Any other, of a run that failed or was
    interrupted, is ended as usual.

    Args:
        runtime: what starts groups.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.name = runtime.name
        self.in_driver = runtime.in_driver
        self._runtime = runtime
        self._resting: tuple[Group, contextlib.ExitStack] | None = None
        self._run_resources = contextlib.ExitStack()
        self._owner = os.getpid()
        self._closed = False

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Elsewhere it is the name of the runtime, as processes cannot be taken along."""
        return str, (self.name,)

    def __repr__(self) -> str:
        return repr(self.name)

    def reduce(self, value: Any) -> Any:
        """See :meth:`drivetrain.plugin.Runtime.reduce`."""
        return self._runtime.reduce(value)

    def validate(self, scaling: ScalingConfig) -> None:
        """See :meth:`drivetrain.plugin.Runtime.validate`."""
        self._runtime.validate(scaling)

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """See :meth:`drivetrain.plugin.Runtime.room`."""
        return self._runtime.room(scaling, running, avoided)

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[Group]:
        """Takes the group that rests, if it is as good as a new one, or starts a new one."""
        # Whoever keeps workers has time at their start, and wants none of them to import anything later.
        preload = (*spec.preload, *spec.warmup)
        spec = replace(spec, run_resources=self._run_resources, preload=preload, warmup=())
        with contextlib.ExitStack() as lifetime:
            group = self._wake(spec, lifetime) or lifetime.enter_context(self._runtime.launch(spec))
            yield group
            if group.rest() and not self._closed:
                self._resting = group, lifetime.pop_all()

    def close(self) -> None:
        """Ends the group that rests, and keeps none any more."""
        if self._owner != os.getpid():  # a process forked from the driver must leave it alone
            return
        self._closed = True
        resting, self._resting = self._resting, None
        with self._run_resources:
            if resting is not None:
                resting[1].close()

    def _wake(self, spec: GroupSpec, lifetime: contextlib.ExitStack) -> Group | None:
        resting, self._resting = self._resting, None
        if resting is None:
            return None
        group, ends = resting
        with contextlib.ExitStack() as ending:
            ending.push(ends)
            if group.renew(spec):
                lifetime.push(ending.pop_all())
                return group
        return None
