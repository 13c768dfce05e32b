"""Runs a whole script or module on every worker, as ``drivetrain run script.py --num-workers N`` does."""

from __future__ import annotations

import builtins
import contextlib
import linecache
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType

from drivetrain._hooks.backend import Backend, WorkerGroup
from drivetrain._hooks.context import TrainContext
from drivetrain._hooks.helpers import node_accelerators, reserve_port, temporary_environment
from drivetrain._plugins.frameworks import launcher_variables

__all__ = ["Script", "ScriptBackend", "package_of", "running_script"]

_running: list[str] = []


def running_script() -> str | None:
    """Return the target of ``drivetrain run`` if this worker runs a script or module as its train function, or None."""
    return _running[-1] if _running else None


def package_of(path: Path) -> tuple[str, str]:
    """Return the name of the package that contains a file, and the directory that contains its outermost package.

    Both are empty if the file belongs to no package. A directory with an ``__init__.py`` is a package.
    """
    names: list[str] = []
    folder = path.absolute().parent
    while folder.name.isidentifier() and (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), str(folder) if names else ""


class Script:
    """A train function that runs a script on a worker in the same way as ``python script.py`` or ``python -m module``.

    The source of the script is sent to the worker, so the file need not exist on the worker's machine. The modules that
    the script imports must exist on that machine.

    Args:
        path: the path of the script, as given by the user.
        arguments: the value of ``sys.argv[1:]`` for the script.
        module: the name of the module whose file the script is, for ``python -m``; None for a script.
    """

    def __init__(self, path: Path, arguments: Sequence[str], module: str | None = None) -> None:
        self.path = str(path.absolute())
        self.argv = [str(path) if module is None else self.path, *arguments]
        self.module = module
        self.target = str(path) if module is None else f"-m {module}"
        self.source = decode_source(path.read_bytes())
        self.__qualname__ = path.name if module is None else module
        if module is None:
            self.package, root = package_of(path)
            self._first_on_path, self._last_on_path = os.path.dirname(self.path), root
        else:
            self.package = module.rpartition(".")[0]
            self._first_on_path, self._last_on_path = os.getcwd(), ""

    def __call__(self) -> None:
        """Run the script in a new module, which replaces ``__main__`` until the script ends."""
        # Tracebacks can show the source lines even if the file does not exist.
        linecache.cache[self.path] = (len(self.source), None, self.source.splitlines(keepends=True), self.path)
        before = sys.modules["__main__"], sys.argv, list(sys.path)
        module = sys.modules["__main__"] = self._new_module()
        sys.argv = list(self.argv)
        sys.path.insert(0, self._first_on_path)
        if self._last_on_path and self._last_on_path not in sys.path:
            sys.path.append(self._last_on_path)
        _running.append(self.target)
        try:
            exec(compile(self.source, self.path, "exec", dont_inherit=True), vars(module))
        finally:
            _running.pop()
            sys.modules["__main__"], sys.argv, sys.path[:] = before

    def _new_module(self) -> ModuleType:
        module = ModuleType("__main__")
        module.__file__ = self.path
        module.__builtins__ = builtins  # type: ignore[attr-defined]
        if self.module is not None:
            module.__spec__ = ModuleSpec(self.module, None, origin=self.path)
        if self.module is not None or self.package:  # relative imports require the name of the package
            module.__package__ = self.package
        return module


class ScriptBackend(Backend):
    """Sets the environment variables of ``torchrun``, with which a script connects the workers itself.

    Args:
        max_failures: the number of retries of the run.
    """

    name = "script"

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures

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
        variables = {**rendezvous, **launcher_variables(context, self._max_failures)}
        if not variables["CUDA_VISIBLE_DEVICES"]:
            del variables["CUDA_VISIBLE_DEVICES"]
        with temporary_environment(variables):
            yield
