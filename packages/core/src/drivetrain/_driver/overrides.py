"""Settings from the environment that replace settings of a script, for programs that start the script."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain._driver.arguments import merge_arguments
from drivetrain._driver.job import TrainingJob
from drivetrain.errors import ConfigurationError

__all__ = ["OVERRIDES", "with_overrides"]

OVERRIDES = "DRIVETRAIN_OVERRIDES"
"""The environment variable with a JSON object. Its keys are ``run_config`` and ``scaling_config``, and their values
are objects with fields of :class:`~drivetrain.RunConfig` and :class:`~drivetrain.ScalingConfig`. A value that is an
object itself, such as that of ``failure_config``, is merged into the script's value; every other value replaces it."""

_CONFIGS = ("run_config", "scaling_config")
_EXPECTED = f"[DT-101] {OVERRIDES}: expected a JSON object with the keys {' and '.join(_CONFIGS)}"

_calls = itertools.count(1)


def with_overrides(job: TrainingJob) -> TrainingJob:
    """Return a job with the settings that the environment replaces.

    The name of the run applies to the first call of ``fit()`` in this process. Later calls append ``-2``, ``-3`` and so
    on to it, because each run needs its own name.

    Raises:
        ConfigurationError: the value is no JSON object of this kind, or a field is unknown or invalid.
    """
    text = os.environ.get(OVERRIDES)
    if not text:
        return job
    try:
        changes: Any = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{_EXPECTED}, got {text!r:.200}: {error}. Correct or unset it") from error
    if not isinstance(changes, dict) or not changes.keys() <= {*_CONFIGS}:
        raise ConfigurationError(f"{_EXPECTED}, got {text!r:.200}. Correct or unset it")
    if wrong := [name for name, fields in changes.items() if not isinstance(fields, dict)]:
        raise ConfigurationError(f"{_EXPECTED}, and objects as their values, got {text!r:.200}. Correct {wrong[0]}")
    merged = merge_arguments({"run_config": job.run_config, "scaling_config": job.scaling}, _numbered(changes))
    return replace(job, run_config=merged["run_config"], scaling=merged["scaling_config"])


def _numbered(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    name = changes.get("run_config", {}).get("name")
    number = next(_calls)
    if not isinstance(name, str) or number == 1:
        return changes
    return {**changes, "run_config": {**changes["run_config"], "name": f"{name}-{number}"}}
