"""Recognizes that another launcher, such as torchrun or srun, has started this process together with others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Launched", "find_launcher"]


class Launched(NamedTuple):
    """How a launcher has started this process.

    Attributes:
        launcher: the name of the launcher.
        variable: the environment variable that contains the number of processes.
        processes: the number of processes that the launcher has started.
    """

    launcher: str
    variable: str
    processes: int


_SIZE_VARIABLES = {
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "mpiexec": "PMI_SIZE",
}


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the launcher that has started this process and at least one other process, or None.

    Workers of drivetrain have the variables of torchrun's ranks as well, but not ``TORCHELASTIC_RUN_ID``.
    """
    variables = dict(_SIZE_VARIABLES)
    if "TORCHELASTIC_RUN_ID" in environment:
        variables["torchrun"] = "WORLD_SIZE"
    for launcher, variable in variables.items():
        value = environment.get(variable, "")
        if value.isdecimal() and int(value) > 1:
            return Launched(launcher, variable, int(value))
    return None
