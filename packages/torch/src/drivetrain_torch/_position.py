"""The position of a data loader in an epoch.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from drivetrain import ConfigurationError
from drivetrain_torch._generators import States, decode, encode
from drivetrain_torch._order import samples_in

__all__ = ["Plan", "Position"]


class Plan(NamedTuple):
    """The options that determine the batches of an epoch.

    The first four fields are those of the plan of a dataset shard, so that both states have the same form.

    Attributes:
        batch_size: the number of rows in a batch; None if it is unknown.
        drop_last: drop the last batch if it is not full.
        buffer_rows: None: a loader has no shuffle buffer.
        seed: the seed of the permutation of ``DistributedSampler``; None for another order.
        drops_rows: see :class:`~drivetrain_torch._order.Order`. A dataset shard has no such option.
    """

    batch_size: int | None
    drop_last: bool
    buffer_rows: None = None
    seed: int | None = None
    drops_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the ranks together have read an epoch. Every rank has read the same number of batches.

    Attributes:
        total: the number of rows in the dataset; None for a stream.
        world_size: the number of ranks among which the epoch was split.
        start: the number of rows at the start of the order that had been read when the rest of the epoch was split
            again; None if the epoch was split once.
        batches: the number of batches that each rank has read since then.
        plan: the options that determine the batches; None if the epoch has not started.
        epoch: the number of epochs that were started before this one.
        kind: the kind of the order. See :class:`~drivetrain_torch._order.Order`.
        passed_epoch: the last number that was passed to ``set_epoch``; None if there is none.
        loader_processes: the number of loader processes, among which a stream may be split.
        generators: the states of the generators at the start of the epoch. Before its start, only the user's own.
        processes: the states of the generators when the loader's processes were started, if this was in an earlier
            epoch; otherwise None.
        part: the state of the sampler or of the stream, if it can save its own state; otherwise None.
    """

    total: int | None
    world_size: int
    start: int | None = None
    batches: int = 0
    plan: Plan | None = None
    epoch: int = 0
    kind: str
    passed_epoch: int | None = None
    loader_processes: int = 0
    generators: States = field(default_factory=dict)
    processes: States | None = None
    part: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Return the position as values that JSON can represent."""
        return {
            "total": self.total,
            "world_size": self.world_size,
            "rows": None if self.start is None else [[self.start, self.total]],
            "batches": self.batches,
            "plan": self.plan and list(self.plan[:4]),
            "epoch": self.epoch,
            "order": self.kind,
            "drops_rows": self.plan is not None and self.plan.drops_rows,
            "set_epoch": self.passed_epoch,
            "loader_processes": self.loader_processes,
            "generators": encode(self.generators),
            "processes": None if self.processes is None else encode(self.processes),
            "part": self.part,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """Return the position that a return value of :meth:`as_dict` describes.

        Raises:
            ConfigurationError: the argument was not created by :meth:`as_dict`.
        """
        try:
            rows, plan, processes = state["rows"], state["plan"], state["processes"]
            return cls(
                total=state["total"],
                world_size=state["world_size"],
                start=None if rows is None else rows[0][0],
                batches=state["batches"],
                plan=None if plan is None else Plan(*plan)._replace(drops_rows=state["drops_rows"]),
                epoch=state["epoch"],
                kind=state["order"],
                passed_epoch=state["set_epoch"],
                loader_processes=state["loader_processes"],
                generators=decode(state["generators"]),
                processes=None if processes is None else decode(processes),
                part=state["part"],
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise ConfigurationError(
                "[DT-728] load_state_dict(): expected the return value of state_dict() of a loader from "
                f"prepare_data_loader, got {state!r:.200}"
            ) from None

    def read_rows(self) -> int:
        """Return how many rows at the start of the order the ranks have read together."""
        assert self.total is not None
        start = self.start or 0
        if self.plan is None:
            return start
        size = self.plan.batch_size or 1
        samples = samples_in(self.total - start, self.world_size, drops_rows=self.plan.drops_rows)
        batches = samples // size if self.plan.drop_last else -(-samples // size)
        # At the end of the epoch, also the rows that were dropped count as read.
        return self.total if self.batches >= batches else start + self.batches * size * self.world_size
