"""Questions to a driver from another process of the same user on its machine, such as where its workers are.

The driver listens on a Unix socket in the abstract namespace, named after the run's id: there is no file that a killed
driver could leave behind. Every user of the machine can take an address of that namespace, so each side verifies that
the other one is a process of the same user, or of root.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from drivetrain.errors import StorageError

__all__ = ["ask", "listen"]

_WAIT_S = 5.0
_ANSWER_S = 30.0
_MAX_ANSWER_BYTES = 16 << 20


def _address(run_id: str) -> str:
    return f"\0drivetrain-{os.getuid()}-{run_id}"


@contextlib.contextmanager
def listen(run_id: str, answer: Callable[[str], str]) -> Iterator[None]:
    """Answers questions about a run for the time of a ``with`` block.

    Args:
        run_id: the run's.
        answer: makes the answer to a question, on a thread of its own.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(run_id))
        except OSError:  # a process that was forked from an earlier driver of the run still has it: no reason to fail
            yield
            return
        listener.listen()
        thread = threading.Thread(target=_serve, args=(listener, answer), daemon=True, name="drivetrain control")
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which also ends the thread's accept()
            thread.join(_WAIT_S)  # the address is taken until it has come out of it


def _serve(listener: socket.socket, answer: Callable[[str], str]) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError:  # the run is over
            return
        with line, contextlib.suppress(OSError):
            line.settimeout(_WAIT_S)
            if _peer_uid(line) not in (0, os.getuid()):
                continue
            question = line.recv(1000).decode(errors="replace")
            try:
                text = answer(question)
            except Exception as error:  # an answer is no reason to end a training
                text = f"the driver could not answer: {type(error).__name__}: {error}"
            line.sendall(text.encode())


def ask(run_id: str, question: str) -> str | None:
    """Asks the driver of a run; None if none on this machine works on it.

    Raises:
        StorageError: the run's id is not valid, the driver accepts no connection, or the socket belongs to another
            user, who may have taken its address.
        TimeoutError: the driver does not answer within half a minute.
    """
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", run_id):
        raise StorageError(f"expected the id of a run to be letters and digits, got {run_id!r}")
    deadline = time.monotonic() + _ANSWER_S
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_ANSWER_S)
        try:
            line.connect(_address(run_id))
        except ConnectionRefusedError:
            return None
        except OSError as error:  # for example, too many processes wait for an answer
            raise StorageError(
                f"the driver of run {run_id} works on this machine, but accepts no connection ({error}). "
                "Try again in a minute"
            ) from error
        if (uid := _peer_uid(line)) not in (0, os.getuid()):
            raise StorageError(
                f"expected the driver of run {run_id} to be a process of this user, got one of user id {uid}. "
                "Its answer was not read"
            )
        line.sendall(question.encode())
        answer = bytearray()
        while part := _receive(line, deadline):
            answer += part
            if len(answer) > _MAX_ANSWER_BYTES:
                raise StorageError(f"expected an answer of at most {_MAX_ANSWER_BYTES:,} bytes, got more")
        return answer.decode(errors="replace") or None


def _receive(line: socket.socket, deadline: float) -> bytes:
    line.settimeout(max(0.001, deadline - time.monotonic()))
    return line.recv(1 << 16)


def _peer_uid(line: socket.socket) -> int:
    """The user id of the process that connected to a Unix socket, or that listens on it."""
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
