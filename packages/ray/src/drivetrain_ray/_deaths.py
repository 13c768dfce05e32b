"""The deaths of actors: determines their causes, and passes them to the driver's thread."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any

from drivetrain import FailureKind
from drivetrain.plugin.runtimes import Wakeup

__all__ = ["Death", "Deaths", "explain_death", "read_message"]

_MAX_LENGTH = 500
_GUESSES = re.compile(r" (?:Some common causes|There are some potential root causes)")
"""The beginning of the possible causes that Ray adds to every message, such as a lack of memory. Ray 2.53 and later use
the first wording."""


@dataclass(frozen=True, slots=True)
class Death:
    """The death of an actor and its cause.

    Attributes:
        reason: a description in one line, which continues a sentence that begins with "the worker".
        kind: the category of the failure.
        lost_node: the node of the actor may have been lost as well.
        is_certain: True if Ray has noticed that the process exited. Otherwise the actor may only be unreachable.
    """

    reason: str
    kind: FailureKind = FailureKind.INFRASTRUCTURE
    lost_node: bool = False
    is_certain: bool = True


class Deaths:
    """Collects the deaths of actors, which Ray reports on its own threads.

    Attributes:
        by_index: the collected deaths, by the index of the actor.
    """

    def __init__(self) -> None:
        self.by_index: dict[int, Death] = {}
        self._reported: deque[tuple[int, Death]] = deque()
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a death is reported."""
        return self._wakeup.fileno()

    def report(self, index: int, call: Any) -> None:
        """Report a death. One of Ray's threads calls this method when the only call of the actor has ended.

        Args:
            index: the index of the actor.
            call: the future of the call.
        """
        self._reported.append((index, explain_death(call.exception())))
        self._wakeup.wake()

    def collect(self) -> None:
        """Add the reported deaths to ``by_index``."""
        self._wakeup.drain()
        while self._reported:
            index, death = self._reported.popleft()
            self.by_index[index] = death

    def wait(self, timeout_s: float) -> None:
        """Wait until a death is reported, or until the timeout, and collect the reported deaths."""
        self._wakeup.wait(timeout_s)
        self.collect()

    def close(self) -> None:
        """Close the descriptors."""
        self._wakeup.close()


def explain_death(error: BaseException | None) -> Death:
    """Return the death of an actor.

    Args:
        error: the error that ended the actor's only call; None if the call returned.
    """
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    if error is None:
        return Death("exited")
    if isinstance(error, ActorDiedError) and error.preempted:
        return Death("exited because its node was drained", FailureKind.PREEMPTION, lost_node=True)
    if isinstance(error, ActorUnavailableError):
        return Death("is unreachable (its node or the network failed)", lost_node=True, is_certain=False)
    return read_message(str(error))


def read_message(message: str) -> Death:
    """Parse the cause of an actor's death from Ray's message, because Ray has no other interface for it.

    No other code depends on the wording of the messages. ``tests/ray/deaths`` contains messages that were recorded
    from each version of Ray.
    """
    text = _GUESSES.split(" ".join(message.split()), maxsplit=1)[0]
    detail = re.search(r".*(?:Worker exit detail: |The actor is dead because )(.*)", text)
    reason = f"died; Ray reports: {detail[1] if detail else text}"[:_MAX_LENGTH].rstrip(".")
    kind = FailureKind.INFRASTRUCTURE
    if re.search(r"running low on memory|OOM|out of memory", reason):
        kind = FailureKind.OUT_OF_MEMORY
    elif re.search(r"SIGTERM|preempt|drain", reason):
        kind = FailureKind.PREEMPTION
    return Death(reason, kind, lost_node=re.search(r"\bnode\b", reason) is not None)
