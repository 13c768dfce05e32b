"""Notices about settings that have no effect. Each is printed once in a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from drivetrain.config import RunConfig

__all__ = ["print_once", "unused_variables"]

_REPLACEMENTS = {
    "RAY_AIR_LOCAL_CACHE_DIR": "checkpoints are stored directly; for temporary files, set TMPDIR",
    "RAY_CHDIR_TO_TRIAL_DIR": "set RunConfig(chdir_to_trial_dir=True)",
    "RAY_STORAGE": "set DRIVETRAIN_STORAGE_PATH or RunConfig(storage_path=...)",
    "RAY_TRAIN_COUNT_PREEMPTION_AS_FAILURE": "set FailureConfig(max_preemptions=...)",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "set RunConfig(worker_output='all')",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "set RunConfig(start_timeout_s=...)",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "set RunConfig(hang_timeout_s=...)",
    "TRAIN_ENABLE_WORKER_SPREAD": "set ScalingConfig(placement_strategy='SPREAD')",
    "TRAIN_PLACEMENT_GROUP_TIMEOUT_S": "set RunConfig(start_timeout_s=...)",
    "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS": "set RunConfig(detailed_metrics=True)",
    "TUNE_RESULT_DIR": "set DRIVETRAIN_STORAGE_PATH or RunConfig(storage_path=...)",
}
"""For environment variables of the reference: what to do instead."""

_PREFIXES = ("RAY_TRAIN_", "RAY_AIR_")
_VERSION = "RAY_TRAIN_V2_ENABLED"  # selects a version of the reference, so nothing replaces it
_OFF = ("", "0", "false", "False")

_printed: set[str] = set()


def print_once(notices: Iterable[str], show: Callable[[str], None]) -> None:
    """Print each notice that this process has not printed before."""
    for notice in notices:
        if notice not in _printed:
            _printed.add(notice)
            show(notice)


def unused_variables(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a notice for each environment variable of the reference that is set and has no effect.

    Args:
        config: the configuration of the run, which may already contain the replacement.
        environment: the environment variables.
    """
    has_storage = config.storage_path is not None or "DRIVETRAIN_STORAGE_PATH" in environment
    is_replaced = {
        "RAY_STORAGE": has_storage,
        "TUNE_RESULT_DIR": has_storage,
        "RAY_CHDIR_TO_TRIAL_DIR": config.chdir_to_trial_dir,
        "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS": config.detailed_metrics,
    }
    for name in sorted(environment):
        if name == _VERSION or (name not in _REPLACEMENTS and not name.startswith(_PREFIXES)):
            continue
        if environment[name] not in _OFF and not is_replaced.get(name):
            remedy = _REPLACEMENTS.get(name, "see 'Migrating from Ray Train' in the documentation")
            yield f"the environment variable {name} has no effect; {remedy}"
