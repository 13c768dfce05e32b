"""Horovod's rendezvous server, through which the workers find each other's addresses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

__all__ = ["Handler", "Server"]


class Handler(RendezvousHandler):  # type: ignore[misc]
    """Horovod's request handler, but the scopes are emptied independently of each other.

    Each worker stores its address in each scope, and sends a DELETE request when it has connected to the other workers
    of the scope. When all of them have sent it, the scope is emptied. Horovod 0.28.1 then also forgets the requests
    for other scopes, which are then never emptied. If the workers connect again, because of a failed collective
    operation or another ``hvd.init()``, they would read old addresses there, and their processes would abort.
    """

    def do_DELETE(self) -> None:
        """Note that a worker has connected. If it is the last one of its scope, empty the scope."""
        _, scope, worker = self.path.split("/")
        server = self.server
        if scope not in server.scope_size:  # a process set, whose workers delete their own addresses
            super().do_DELETE()
            return
        with server.finished_list_lock, server.cache_lock:
            finished = server.finished_list[scope]
            finished.append(worker)
            if len(finished) == server.scope_size[scope]:
                finished.clear()
                server.cache.get(scope, {}).clear()
        self.send_status_code(200)


class Server:
    """Horovod's rendezvous server, on a thread of this process.

    Args:
        address: the address on which the server listens; empty for all addresses of this machine.
        handler: the class that handles the requests.
        slots: the initial slots; see :meth:`set_slots`.
        verbose: the level of the server's log.

    Attributes:
        address: the address on which the server listens.
        port: its port, which the system has chosen.
    """

    def __init__(self, address: str, handler: type, slots: Sequence[Any], verbose: int) -> None:
        self._server = RendezvousHTTPServer((address, 0), handler, verbose)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, address: None  # ignore broken connections of lost workers
        self.address: str
        self.port: int
        self.address, self.port = self._server.server_address[:2]
        self.set_slots(slots)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="Horovod's rendezvous")
        self._thread.start()

    def set_slots(self, slots: Sequence[Any]) -> None:
        """Replace the slots that the server gives to the workers, and delete all addresses."""
        self._server.init(list(slots))

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
