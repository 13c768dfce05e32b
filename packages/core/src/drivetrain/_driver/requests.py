"""Responds to the requests that ranks make while they report a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drivetrain._wire.commands import CommitState, RunningTaskCommand, StoreApart
from drivetrain._wire.events import FilesClaimed

__all__ = ["RankRequests"]


class RankRequests:
    """The requests of one attempt's ranks that concern uncommitted checkpoints.

    Args:
        send: sends a command to ranks.
    """

    def __init__(self, send: Callable[[Sequence[int], RunningTaskCommand], None]) -> None:
        self._send = send
        self._waiting: dict[int, set[int]] = {}
        self._claims: dict[str, dict[str, int]] = {}

    def await_commit(self, number: int, rank: int) -> None:
        """Note that a rank waits until the checkpoint with this report number is committed."""
        self._waiting.setdefault(number, set()).add(rank)

    def explain(self, number: int, rank: int, missing: Sequence[int]) -> None:
        """Tell a rank which ranks its checkpoint waits for, if it is not committed yet."""
        if rank in self._waiting.get(number, ()):
            self._send([rank], CommitState(number, is_committed=False, missing=tuple(missing)))

    def note_commit(self, number: int) -> None:
        """Notify the ranks that wait for this commit."""
        if ranks := self._waiting.pop(number, None):
            self._send(sorted(ranks), CommitState(number, is_committed=True))

    def forget(self, directory: str) -> None:
        """Forget which files ranks store in a directory, because no rank will store further files there."""
        self._claims.pop(directory, None)

    def claim(self, event: FilesClaimed) -> None:
        """Tell a rank which of its files another rank stores under the same name, so that neither replaces the other's.

        The first rank that asks stores the file in the checkpoint's directory. The commit moves files if the rank of
        the file to keep was not the first.
        """
        owners = self._claims.setdefault(event.directory, {})
        apart = frozenset(name for name in event.names if owners.setdefault(name, event.rank) != event.rank)
        self._send([event.rank], StoreApart(event.directory, apart))
