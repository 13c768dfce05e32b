"""The driver's responses that a train function waits for while it reports."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

__all__ = ["Responses"]


class Responses:
    """Passes responses from the thread that receives commands to the threads that wait for them."""

    def __init__(self) -> None:
        self._received: dict[Hashable, Any] = {}
        self._changed = threading.Condition()

    def put(self, key: Hashable, response: Any) -> None:
        """Store the response to a request. Any thread may call this method."""
        with self._changed:
            self._received[key] = response
            self._changed.notify_all()

    def take(self, key: Hashable, timeout_s: float) -> Any:
        """Wait for the response to a request, and return it; return None if it does not arrive in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._received, timeout_s)
            return self._received.pop(key, None)
