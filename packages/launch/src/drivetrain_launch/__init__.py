"""The runtime whose workers are started by a command, such as ``srun``, ``mpirun`` or ``ssh``.

The command starts one *supervisor* for each worker: ``python -m drivetrain_launch``. A supervisor connects
to the driver, forks the worker process when the driver asks for it, and reports how the process has ended. When the
connection to the driver closes, the supervisor kills the worker and everything that the worker has started.

Modules, from the bottom up: ``_template`` (the command line), ``_shares`` (GPUs and CPUs of the workers),
``_supervisor`` (the process on the worker's node), ``_token`` (how it gets the token of the driver), ``_launcher`` (a
running command),
``_commands`` (all of a run), ``_launch`` (the commands and the connections to supervisors), ``_group`` and
``_runtime``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_launch._runtime import CommandRuntime

__all__ = [
    "CommandRuntime",
]

__version__ = "0.1.0"

_MODULES = {
    "CommandRuntime": "_runtime",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
