"""The entry of a committed checkpoint in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CommittedCheckpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedCheckpoint:
    """An entry of the manifest.

    Attributes:
        name: the checkpoint's directory in the run directory.
        index: the index in the run of the report that it came with.
        iteration: the ``_training_iteration`` of that report.
        metrics: the metrics of that report.
        time: Unix time in seconds of the commit.
        ordinal: how many checkpoints the run had committed with it.
    """

    name: str
    index: int
    iteration: int
    metrics: Mapping[str, Any]
    time: float
    ordinal: int = 0
