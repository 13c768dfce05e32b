"""The server of `drivetrain runs serve`, on a thread of the test."""

import contextlib
import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drivetrain_console._views.server import RunsServer
from tests.support import DEADLINE_S, local_storage


@contextlib.contextmanager
def serving(directory: Path, **options: Any) -> Iterator[RunsServer]:
    """Serves a directory of runs for the duration of a `with` block."""
    server = RunsServer(local_storage(directory), **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def get(
    server: RunsServer, path: str, *, host: str = "127.0.0.1", limit_s: float = DEADLINE_S, **headers: str
) -> tuple[int, dict[str, str], str]:
    """The status, the headers and the text of a response."""
    connection = http.client.HTTPConnection(host, urlsplit(server.url).port, timeout=limit_s)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return response.status, names, response.read().decode()
