"""Chooses when to kill what: a rank or the driver, at a report or between two reports of the undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drivetrain_testing._prove.events import JobEvents

__all__ = ["VICTIMS", "Kill", "Victim", "choose_kills"]

Victim = Literal["rank", "driver", "node"]
VICTIMS: tuple[Victim, ...] = ("rank", "driver")
"""The victims by default, in turn."""

_SHORTEST_DELAY_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A ``kill -9``, at a moment that a rank reaches.

    Attributes:
        victim: ``"rank"`` for the rank that reaches the moment, ``"node"`` for the node of a Ray cluster on which it
            runs, or ``"driver"``. After the kill of the driver, the script restarts, and resumes.
        rank: the rank.
        report: the ``_training_iteration`` of the rank's report that precedes the moment.
        batches: the number of batches that the rank has read since this report.
        delay_s: seconds to wait after that; for jobs whose batches are not known.
    """

    victim: Victim
    rank: int
    report: int
    batches: int = 0
    delay_s: float = 0.0

    def __str__(self) -> str:
        who = {"driver": "the driver", "rank": f"rank {self.rank}", "node": f"the node of rank {self.rank}"}[
            self.victim
        ]
        when = f"after report {self.report}"
        if self.batches:
            when = f"{when} and batch {self.batches} of rank {self.rank}"
        elif self.delay_s:
            when = f"{self.delay_s:.2f} s {when}"
        return f"{who} {when}"


def choose_kills(
    events: JobEvents, committed: Sequence[int], number: int, seed: int, victims: Sequence[Victim] = VICTIMS
) -> list[Kill]:
    """Return kills that are spread over the run, sorted by their moments.

    The victims are killed in turn. Every second kill is at a report; the others are at a random moment before
    the next report.

    Args:
        events: the events of the undisturbed run.
        committed: the iterations whose checkpoints the undisturbed run committed, and which are not the last report.
        number: the number of kills.
        seed: the seed of the random choices.
        victims: the victims.
    """
    choice = random.Random(seed)
    kills = []
    for index in range(number):
        low, high = index * len(committed) // number, (index + 1) * len(committed) // number
        report = committed[choice.randrange(low, max(high, low + 1)) if high > low else min(low, len(committed) - 1)]
        ranks = sorted(rank for rank, reports in events.reports.items() if report in reports)
        rank = choice.choice(ranks)
        victim = victims[index % len(victims)]
        batches, delay_s = 0, 0.0
        if index % 4 in (0, 3):
            batches = choice.randint(0, len(events.batches.get(rank, {}).get(report, [])))
            if not events.has_rows and events.interval_s(rank, report) > _SHORTEST_DELAY_S:
                delay_s = choice.random() * events.interval_s(rank, report)
        kills.append(Kill(victim=victim, rank=rank, report=report, batches=batches, delay_s=delay_s))
    return kills
