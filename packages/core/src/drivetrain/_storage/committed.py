"""The manifest's entry of a committed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._storage.layout import require_checkpoint_name
from drivetrain._storage.reading import Fields

__all__ = ["CommittedCheckpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint, as it is recorded in the manifest.

    Attributes:
        name: the checkpoint's directory, relative to the run directory.
        number: the number, in the run, of the report that the checkpoint belongs to.
        iteration: the ``_training_iteration`` of that report.
        metrics: the metrics of that report.
        time: Unix time of the commit in seconds.
        ordinal: the position of the checkpoint among all checkpoints that the run has ever committed, from 1; 0 if
            unknown.
        world_size: the number of ranks that the run had then; 0 if unknown.
        ranks: the ranks whose files the checkpoint contains; empty for all ranks.

    Raises:
        StorageError: the name is not valid for a checkpoint, for example because it leads out of the run directory.
    """

    name: str
    number: int
    iteration: int
    metrics: Mapping[str, Any]
    time: float
    ordinal: int = 0
    world_size: int = 0
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_checkpoint_name(self.name, "the entry of a committed checkpoint")

    def has_files_of(self, rank: int) -> bool:
        """Return True if the checkpoint is known to contain files of a rank."""
        return rank < self.world_size and (not self.ranks or rank in self.ranks)

    @classmethod
    def parse(cls, value: object, where: str) -> CommittedCheckpoint:
        """Parse an entry of the manifest or of a listing. Unknown fields are ignored.

        Args:
            value: the JSON object.
            where: the file that contains it, for error messages.

        Raises:
            StorageError: a field is missing or has another type.
        """
        fields = Fields(value, where)
        return cls(
            name=fields.text("name"),
            number=fields.integer("number"),
            iteration=fields.integer("iteration"),
            metrics=fields.mapping("metrics"),
            time=fields.number("time"),
            ordinal=fields.integer("ordinal", 0),
            world_size=fields.integer("world_size", 0),
            ranks=tuple(fields.items("ranks", [])),
        )
