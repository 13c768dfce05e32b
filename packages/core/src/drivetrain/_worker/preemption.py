"""How all ranks learn of a preemption at the same step, without a barrier while there is none.

A train function that can end early asks in each step, which costs the count of a number. When there is a reason to end,
the controller has every rank say how often it has asked, and from then on the next question waits. The controller names
the step, one more than the highest number, and the ranks go on: each is told when it has asked so often. Ranks that
ask once per step of a collective loop are at most one step apart, so none waits for one that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from drivetrain._wire.events import Asking, Counted, Event, PreemptionInfo, Renumbered
from drivetrain._worker.signals import take_back_sigterm

__all__ = ["Preemption"]

_AGREEMENT_S = 60.0


class Preemption:
    """A rank's side of the agreement.

    Args:
        rank: whose.
        tell: delivers an event to the controller.
        before: called with each question; where the controller is in this process, it takes its turn there.
    """

    def __init__(self, rank: int, tell: Callable[[Event], None], before: Callable[[], None] | None = None) -> None:
        self.rank = rank
        self.tell = tell
        self._before = before
        self._count = 0
        self._asked = False
        self._step: int | None = None
        self._info: PreemptionInfo | None = None
        self._settled = threading.Condition()
        self.was_told = False
        self.is_over = False
        self.renumber: Callable[[int, int], None] = lambda number, quiet: None

    @property
    def is_watched(self) -> bool:
        """Whether the train function has ever asked, and runs."""
        return self._count > 0 and not self.is_over

    def poll(self) -> PreemptionInfo | None:
        """The train function asks."""
        if not self._count:
            take_back_sigterm()
            self.tell(Asking(self.rank))
        self._count += 1  # before the look at what the other thread sets before it looks at this
        if self._before is not None:
            self._before()
        if not self._asked:
            return None
        with self._settled:
            # Bounded for a driver that is gone without a word.
            if not self._settled.wait_for(lambda: self._step is not None, _AGREEMENT_S):
                return None
        assert self._step is not None
        if self._count < self._step:
            return None
        self.was_told = True
        return self._info

    def count(self) -> None:
        """The controller wants to know how often the function has asked; from now on its questions wait."""
        self._asked = True
        self.tell(Counted(self.rank, self._count))

    def follow(self, number: int, quiet: int) -> None:
        """Another rank was replaced: the next report of this one is to come after that number, as the new one's.

        Its questions are counted anew as well, as those of the new rank are.
        """
        self._count = 0
        self.renumber(number, quiet)
        self.tell(Renumbered(self.rank))

    def settle(self, step: int, info: PreemptionInfo) -> None:
        """The controller has said at which question the function is told."""
        with self._settled:
            self._step, self._info = step, info
            self._settled.notify_all()
