"""A runtime that keeps the worker group of a run, and reuses it for the next run if a new group would be equivalent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drivetrain.plugin import Runtime
from drivetrain.plugin.runtimes import Group, GroupSpec

if TYPE_CHECKING:
    from drivetrain import ScalingConfig
    from drivetrain.plugin import WorkerInfo

__all__ = ["WarmRuntime"]


class WarmRuntime(Runtime):
    """Reuses one worker group for several runs.

    When all ranks of a group have returned, the group is parked: it is kept until the next run. The group of a run that
    failed or was interrupted is terminated as usual.

    Args:
        runtime: the runtime that starts new groups.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.name = runtime.name
        self.in_driver = runtime.in_driver
        self._runtime = runtime
        self._parked: tuple[Group, contextlib.ExitStack] | None = None
        self._run_resources = contextlib.ExitStack()
        self._owner = os.getpid()
        self._closed = False

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as the name of the runtime, because processes cannot be pickled."""
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
        """Reuse the parked group if it is equivalent to a new group; otherwise start a new group."""
        # The workers serve several runs, so a longer start is acceptable: they import everything before the first run.
        preload = (*spec.preload, *spec.warmup)
        spec = replace(spec, run_resources=self._run_resources, preload=preload, warmup=())
        with contextlib.ExitStack() as lifetime:
            group = self._reuse(spec, lifetime) or lifetime.enter_context(self._runtime.launch(spec))
            yield group
            if group.park() and not self._closed:
                self._parked = group, lifetime.pop_all()

    def close(self) -> None:
        """Terminate the parked group, and park no group from now on."""
        if self._owner != os.getpid():  # a process forked from the driver must not touch the group
            return
        self._closed = True
        parked, self._parked = self._parked, None
        with self._run_resources:
            if parked is not None:
                parked[1].close()

    def _reuse(self, spec: GroupSpec, lifetime: contextlib.ExitStack) -> Group | None:
        parked, self._parked = self._parked, None
        if parked is None:
            return None
        group, group_lifetime = parked
        with contextlib.ExitStack() as stack:
            stack.push(group_lifetime)
            if group.reuse(spec):
                lifetime.push(stack.pop_all())
                return group
        return None
