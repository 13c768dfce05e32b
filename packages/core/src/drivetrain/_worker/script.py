"""Runs a whole script on every worker, as ``drivetrain run script.py --num-workers N`` does."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from drivetrain._hooks.backend import Backend, WorkerGroup
from drivetrain._hooks.context import TrainContext
from drivetrain._hooks.frameworks import launcher_variables
from drivetrain._hooks.helpers import node_accelerators, reserve_port, temporary_environment

__all__ = ["Script", "ScriptBackend", "running_script"]

_running: list[str] = []


def running_script() -> str | None:
    """Return the path of the script that this worker runs as its train function; None if it runs none."""
    return _running[-1] if _running else None


class Script:
    """A train function that runs a script on a worker in the same way as ``python script.py``.

    The source of the script is sent to the worker, so the file need not exist on the worker's machine. The modules that
    the script imports must exist on that machine.

    Args:
        path: the path of the script.
        arguments: the value of ``sys.argv[1:]`` for the script.
    """

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        self.path = str(path.absolute())
        self.arguments = list(arguments)
        self.source = path.read_text(encoding="utf-8")
        self.__qualname__ = path.name

    def __call__(self) -> None:
        """Run the script in a new module, which replaces ``__main__`` until the script ends."""
        module = ModuleType("__main__")
        module.__file__ = self.path
        # Tracebacks can show the source lines even if the file does not exist.
        linecache.cache[self.path] = (len(self.source), None, self.source.splitlines(keepends=True), self.path)
        before = sys.modules["__main__"], sys.argv, list(sys.path)
        sys.modules["__main__"], sys.argv = module, [self.path, *self.arguments]
        sys.path.insert(0, os.path.dirname(self.path))
        _running.append(self.path)
        try:
            exec(compile(self.source, self.path, "exec"), vars(module))
        finally:
            _running.pop()
            sys.modules["__main__"], sys.argv, sys.path[:] = before


class ScriptBackend(Backend):
    """Sets the environment variables of ``torchrun``, with which a script connects the workers itself."""

    name = "script"

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Reserve a port on rank 0, which the script binds, and return its address and the GPUs of each node."""
        (port,) = group.run(reserve_port, ranks=[0])
        return [
            {"MASTER_ADDR": group.workers[0].ip, "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": gpus}
            for gpus in node_accelerators(group.workers)
        ]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Set the variables while the script runs. Each worker sees all GPUs of its node, as under ``torchrun``."""
        variables = {**rendezvous, **launcher_variables(context)}
        if not variables["CUDA_VISIBLE_DEVICES"]:
            del variables["CUDA_VISIBLE_DEVICES"]
        with temporary_environment(variables):
            yield
