"""DeepSpeed in a drivetrain run.

``deepspeed.initialize`` works unchanged in the train function of a :class:`~drivetrain_torch.TorchTrainer`: the process
group is there already. Importing this module does not import deepspeed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain import ConfigurationError

__all__ = ["check_config"]


def check_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Refuses a DeepSpeed configuration with values that only Accelerate and Transformers fill in.

    Args:
        config: the configuration, or the path of its JSON file.

    Returns:
        The configuration, as ``deepspeed.initialize(config=...)`` takes it.

    Raises:
        ConfigurationError: it cannot be read, or a value is ``"auto"``; the message names all of them.

    Example:
        >>> check_config({"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}})
        {'train_micro_batch_size_per_gpu': 8, 'zero_optimization': {'stage': 2}}
    """
    found: Any = config
    if not isinstance(config, Mapping):
        try:
            found = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"check_config: expected a JSON file, got {os.fspath(config)}: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"check_config: expected a mapping, got {found!r}")
    if unresolved := list(_unresolved(found)):
        raise ConfigurationError(
            f'a DeepSpeed configuration: expected values, got "auto" for {", ".join(unresolved)}: write numbers there, '
            "or leave the configuration to Accelerate or Transformers, which fill them in"
        )
    return dict(found)


def _unresolved(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if value == "auto":
            yield prefix + key
        elif isinstance(value, Mapping):
            yield from _unresolved(value, f"{prefix}{key}.")
