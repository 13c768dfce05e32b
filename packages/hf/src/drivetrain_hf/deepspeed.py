"""DeepSpeed in a drivetrain run.

``deepspeed.initialize`` works unchanged in the train function of a :class:`~drivetrain_torch.TorchTrainer`, because the
process group exists already. Importing this module does not import deepspeed.
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
    """Check that a DeepSpeed configuration has no ``"auto"`` values, which only Accelerate and Transformers fill in.

    Args:
        config: the configuration, or the path of its JSON file.

    Returns:
        The configuration, in the form that ``deepspeed.initialize(config=...)`` takes.

    Raises:
        ConfigurationError: the configuration cannot be read, or a value is ``"auto"``. The message lists the keys of
            all such values.

    Example:
        >>> check_config({"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}})
        {'train_micro_batch_size_per_gpu': 8, 'zero_optimization': {'stage': 2}}
    """
    content: Any = config
    if not isinstance(config, Mapping):
        try:
            content = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"check_config: expected a JSON file, got {os.fspath(config)}: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"check_config: expected a mapping, got {content!r}")
    if unresolved := list(_unresolved(content)):
        raise ConfigurationError(
            f'check_config: expected explicit values, got "auto" for {", ".join(unresolved)}. Set them, or pass the '
            "configuration to Accelerate or Transformers, which fill them in"
        )
    return dict(content)


def _unresolved(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if value == "auto":
            yield prefix + key
        elif isinstance(value, Mapping):
            yield from _unresolved(value, f"{prefix}{key}.")
