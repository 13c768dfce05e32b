"""Questions to a driver from another process of the same user on its machine, such as where its workers are.

The driver listens on a Unix socket in the abstract namespace, named after the run's id: there is no file that a killed
driver could leave behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

__all__ = ["ask", "listen"]

_WAIT_S = 5.0
_ANSWER_S = 30.0


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
            _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (0, os.getuid()):
                continue
            question = line.recv(1000).decode()
            try:
                text = answer(question)
            except Exception as error:  # an answer is no reason to end a training
                text = f"the driver could not answer: {type(error).__name__}: {error}"
            line.sendall(text.encode())


def ask(run_id: str, question: str) -> str | None:
    """Asks the driver of a run; None if none on this machine works on it.

    Raises:
        TimeoutError: it does not answer within half a minute.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_ANSWER_S)
        try:
            line.connect(_address(run_id))
        except ConnectionRefusedError:
            return None
        line.sendall(question.encode())
        parts = []
        while part := line.recv(1 << 16):
            parts.append(part)
        return b"".join(parts).decode(errors="replace") or None
