"""The states of an attempt, with a transition table.

Only this table decides which state comes next. The other modules apply a trigger, and then act on the new state. If the
table has no entry for the state and the trigger, the state does not change.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping

__all__ = ["ATTEMPT_TRANSITIONS", "AttemptState", "StateMachine", "Trigger"]


class AttemptState(enum.Enum):
    """The state of an attempt. ``SUCCEEDED`` and all states below it are final."""

    RUNNING = enum.auto()
    STOPPING = enum.auto()  # the stop condition was met; earlier checkpoints are being completed
    PREEMPTING = enum.auto()  # the ranks were asked to save and return because their processes will be terminated
    INTERRUPTING = enum.auto()  # the ranks have received the driver's signal, and handle it
    GROWING = enum.auto()  # the ranks were asked to save and return because the cluster has room for more of them
    RANKS_LOST = enum.auto()  # processes were lost, but no rank raised an exception: replacement may be possible
    REPLACING = enum.auto()  # the other ranks wait for the new processes
    SUCCEEDED = enum.auto()
    PREEMPTED = enum.auto()
    GROWN = enum.auto()  # the next attempt has more workers
    FAILED = enum.auto()

    @property
    def is_active(self) -> bool:
        """True if the attempt has not ended, and no rank has failed or been lost."""
        return self in (
            AttemptState.RUNNING,
            AttemptState.STOPPING,
            AttemptState.PREEMPTING,
            AttemptState.INTERRUPTING,
            AttemptState.GROWING,
        )


class Trigger(enum.Enum):
    """An occurrence that can change the state of an attempt."""

    STOP_CONDITION_MET = enum.auto()
    CHECKPOINTS_COMPLETED = enum.auto()  # all checkpoints that were reported before the stop condition was met
    PREEMPTION_REQUESTED = enum.auto()  # by SIGTERM to a rank, or by an interrupt of the driver
    SIGNAL_SENT = enum.auto()  # the driver was interrupted, and sends the signal to the script that the ranks run
    GROWTH_REQUESTED = enum.auto()  # there is room for more workers, and the ranks can save first
    GROWTH_WITHOUT_SAVING = enum.auto()  # the ranks cannot save, so the next attempt uses the latest checkpoint
    ALL_RETURNED = enum.auto()  # every train function returned, and has finished
    ALL_SAVED = enum.auto()  # every train function returned, at least one of them before its work was done
    RANK_FAILED = enum.auto()
    RANK_LOST = enum.auto()
    REPLACEMENT_STARTED = enum.auto()
    RANKS_REPLACED = enum.auto()
    DEADLINE_PASSED = enum.auto()


_S, _T = AttemptState, Trigger

ATTEMPT_TRANSITIONS: Mapping[AttemptState, Mapping[Trigger, AttemptState]] = {
    _S.RUNNING: {
        _T.STOP_CONDITION_MET: _S.STOPPING,
        _T.PREEMPTION_REQUESTED: _S.PREEMPTING,
        _T.SIGNAL_SENT: _S.INTERRUPTING,
        _T.GROWTH_REQUESTED: _S.GROWING,
        _T.GROWTH_WITHOUT_SAVING: _S.GROWN,
        _T.ALL_RETURNED: _S.SUCCEEDED,
        _T.RANK_FAILED: _S.FAILED,
        _T.RANK_LOST: _S.RANKS_LOST,
        _T.DEADLINE_PASSED: _S.FAILED,
    },
    _S.STOPPING: {
        _T.CHECKPOINTS_COMPLETED: _S.SUCCEEDED,
        _T.ALL_RETURNED: _S.SUCCEEDED,
        _T.ALL_SAVED: _S.SUCCEEDED,
        _T.RANK_FAILED: _S.FAILED,
        _T.RANK_LOST: _S.FAILED,
        _T.DEADLINE_PASSED: _S.SUCCEEDED,
    },
    _S.PREEMPTING: {
        _T.STOP_CONDITION_MET: _S.STOPPING,
        _T.ALL_RETURNED: _S.SUCCEEDED,
        _T.ALL_SAVED: _S.PREEMPTED,
        _T.RANK_FAILED: _S.FAILED,
        _T.RANK_LOST: _S.FAILED,
        _T.DEADLINE_PASSED: _S.PREEMPTED,
    },
    _S.INTERRUPTING: {  # a rank that raises KeyboardInterrupt, or exits, leaves the others time
        _T.ALL_RETURNED: _S.PREEMPTED,
        _T.ALL_SAVED: _S.PREEMPTED,
        _T.DEADLINE_PASSED: _S.PREEMPTED,
    },
    _S.GROWING: {
        _T.STOP_CONDITION_MET: _S.STOPPING,
        _T.PREEMPTION_REQUESTED: _S.PREEMPTING,
        _T.SIGNAL_SENT: _S.INTERRUPTING,
        _T.ALL_RETURNED: _S.SUCCEEDED,
        _T.ALL_SAVED: _S.GROWN,
        _T.RANK_FAILED: _S.FAILED,
        _T.RANK_LOST: _S.FAILED,
        _T.DEADLINE_PASSED: _S.GROWN,
    },
    _S.RANKS_LOST: {
        _T.STOP_CONDITION_MET: _S.FAILED,
        _T.PREEMPTION_REQUESTED: _S.FAILED,
        _T.SIGNAL_SENT: _S.FAILED,
        _T.RANK_FAILED: _S.FAILED,
        _T.REPLACEMENT_STARTED: _S.REPLACING,
    },
    _S.REPLACING: {
        _T.STOP_CONDITION_MET: _S.FAILED,
        _T.PREEMPTION_REQUESTED: _S.FAILED,
        _T.SIGNAL_SENT: _S.FAILED,
        _T.RANK_FAILED: _S.FAILED,
        _T.RANK_LOST: _S.FAILED,
        _T.RANKS_REPLACED: _S.RUNNING,
        _T.DEADLINE_PASSED: _S.FAILED,
    },
}


class StateMachine:
    """Holds the state of one attempt, and changes it according to the transition table.

    Attributes:
        state: the current state.
        entered_at: the monotonic time in seconds at which the attempt entered this state.
    """

    def __init__(self) -> None:
        self.state = AttemptState.RUNNING
        self.entered_at = time.monotonic()

    def apply(self, trigger: Trigger) -> bool:
        """Enter the state that follows after a trigger; return True if the state changed."""
        following = ATTEMPT_TRANSITIONS.get(self.state, {}).get(trigger, self.state)
        if following is self.state:
            return False
        self.state, self.entered_at = following, time.monotonic()
        return True
