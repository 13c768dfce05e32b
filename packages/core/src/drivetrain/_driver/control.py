"""Lets other processes of the same user and machine send requests to a driver, for example for its workers' stacks.

The driver listens on a Unix socket in the abstract namespace, at an address that contains the run's id. Such a socket
needs no file, so a killed driver leaves none behind. Any user of the machine can bind an address in that namespace.
Each side therefore verifies that the other side is a process of the same user or of root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

from drivetrain._base.peers import is_trusted, peer_uid
from drivetrain.errors import StorageError

__all__ = ["ask", "listen"]

_WAIT_S = 5.0
_REPLY_S = 30.0
_MAX_REPLY_BYTES = 16 << 20
_RETRY_S = 0.1
_TRANSIENT_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}
"""Errors of ``accept()`` after which a later call can succeed: for example, no file descriptor was free."""


def _address(run_id: str) -> str:
    return f"\0drivetrain-{os.getuid()}-{run_id}"


@contextlib.contextmanager
def listen(run_id: str, reply: Callable[[str], str]) -> Iterator[None]:
    """Reply to requests about a run while the ``with`` block is active.

    Args:
        run_id: the id of the run.
        reply: returns the reply to a request; called on a separate thread.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(run_id))
        except OSError:  # a child of an earlier driver may still hold the address; continue without replies
            yield
            return
        listener.listen()
        ended = threading.Event()
        thread = threading.Thread(target=_serve, args=(listener, reply, ended), daemon=True, name="drivetrain control")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # also ends the accept() of the thread
            thread.join(_WAIT_S)  # the address is in use until accept() has returned


def _serve(listener: socket.socket, reply: Callable[[str], str], ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in _TRANSIENT_ERRORS:  # the run ended
                return
            ended.wait(_RETRY_S)
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_WAIT_S)
            if not is_trusted(connection):
                continue
            request = connection.recv(1000).decode(errors="replace")
            try:
                text = reply(request)
            except Exception as error:  # a failed request must not end the training
                text = f"the driver could not reply: {type(error).__name__}: {error}"
            connection.sendall(text.encode())


def ask(run_id: str, request: str) -> str | None:
    """Send a request to the driver of a run, and return the reply; None if the run has no driver on this machine.

    The return value is also None if the connection is lost before the whole reply has arrived, because the driver has
    then ended.

    Raises:
        StorageError: the run's id is not valid, the driver does not accept the connection within 30 seconds, the reply
            is too long, or a process of another user has bound the driver's address.
        TimeoutError: the driver has accepted the connection, but does not reply within 30 seconds.
    """
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", run_id):
        raise StorageError(f"run id: expected up to 64 letters, digits, - and _, got {run_id!r}")
    deadline = time.monotonic() + _REPLY_S
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_REPLY_S)
        try:
            connection.connect(_address(run_id))
        except ConnectionRefusedError:
            return None
        except OSError as error:  # for example, too many processes wait for a reply
            raise StorageError(
                f"the driver of run {run_id} is on this machine but does not accept connections ({error}). "
                "Try again in a minute"
            ) from error
        if not is_trusted(connection):
            raise StorageError(
                f"the driver of run {run_id}: expected a process of this user, got a process of user id "
                f"{peer_uid(connection)}. Its reply was not read"
            )
        received = bytearray()
        try:
            connection.sendall(request.encode())
            while part := _receive(connection, deadline):
                received += part
                if len(received) > _MAX_REPLY_BYTES:
                    raise StorageError(
                        f"the driver of run {run_id}: expected a reply of at most {_MAX_REPLY_BYTES:,} bytes, got more"
                    )
        except ConnectionError:  # the driver ended
            return None
        return received.decode(errors="replace") or None


def _receive(connection: socket.socket, deadline: float) -> bytes:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    return connection.recv(1 << 16)
