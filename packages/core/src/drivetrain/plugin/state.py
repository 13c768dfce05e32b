"""Training state: the half that knows no framework, and the states of random generators."""

from drivetrain._base.lazy import publish
from drivetrain._plugins.frameworks import (
    STATE_ERRORS,
    keep_random_states,
    random_states,
    restore_random_states,
)
from drivetrain._worker.preemption import StopTraining
from drivetrain._worker.state import (
    COMMON_ENTRIES,
    BaseTrainState,
    Differences,
    StateFiles,
    check_common_entries,
    check_names,
    check_parts,
)

__all__ = [
    "COMMON_ENTRIES",
    "STATE_ERRORS",
    "BaseTrainState",
    "Differences",
    "StateFiles",
    "StopTraining",
    "check_common_entries",
    "check_names",
    "check_parts",
    "keep_random_states",
    "random_states",
    "restore_random_states",
]

publish(__name__)
