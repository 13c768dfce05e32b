"""Notices when Ray drains nodes: before a cloud reclaims a machine, or before an autoscaler removes a node."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping

from drivetrain.plugin.runtimes import Wakeup

__all__ = ["Drains", "draining_nodes"]

_POLL_S = 1.0
_STOP_WAIT_S = 1.0


class Drains:
    """Asks Ray regularly, on a thread, which nodes it drains."""

    def __init__(self) -> None:
        self._latest: Mapping[str, float | None] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a node begins to be drained."""
        return self._wakeup.fileno()

    def start(self) -> None:
        """Start to ask."""
        self.stop()
        self._latest = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._stopped,), daemon=True)
        self._thread.start()

    def take(self) -> Mapping[str, float | None]:
        """Return the nodes that are being drained, with the Unix times in seconds at which they end, if known."""
        self._wakeup.drain()
        return self._latest

    def stop(self) -> None:
        """Stop asking. A call that does not return is abandoned."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_S)
            self._thread = None

    def close(self) -> None:
        """Stop asking, and close the descriptors."""
        self.stop()
        self._wakeup.close()

    def _watch(self, stopped: threading.Event) -> None:
        while not stopped.wait(_POLL_S):
            nodes = draining_nodes()
            if stopped.is_set():
                return
            if nodes.keys() - self._latest.keys():
                self._latest = nodes
                self._wakeup.wake()


def draining_nodes() -> dict[str, float | None]:
    """Return the ids of the nodes that Ray drains, each with the Unix time in seconds at which it ends, if known.

    Ray has no public interface for this: its lists of nodes do not change until the node has ended. This function is
    the only one that uses a private name of Ray. If a version of Ray does not have that name, this function warns once
    per process, and returns an empty dict. It also returns an empty dict if the cluster cannot be reached, which the
    group notices itself. ``tests/contract/test_ray_cluster.py`` shows that the name still works.
    """
    ask = _find_interface()
    try:
        return {node: deadline_ms / 1000 or None for node, deadline_ms in ask().items()}
    except Exception:  # Ray raises different exceptions when the connection is lost
        return {}


@functools.cache
def _find_interface() -> Callable[[], Mapping[str, int]]:
    """Return Ray's function for the nodes that are being drained, with their deadlines in ms, or 0 without one."""
    try:
        from ray._private.state import state

        ask: Callable[[], Mapping[str, int]] = state.get_draining_nodes
        return ask
    except (ImportError, AttributeError) as error:
        warnings.warn(f"this version of Ray does not report that it drains nodes: {error}", stacklevel=2)
        return dict
