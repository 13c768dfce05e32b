"""What a run prints here: whole lines, and one status line below them that is redrawn in place."""

from __future__ import annotations

import shutil
import sys
import threading
from typing import TextIO

__all__ = ["Console"]

_CLEAR = "\r\x1b[2K"


class Console:
    """Keeps the status line, which goes to the standard error, out of the way of lines that are printed."""

    def __init__(self) -> None:
        self._status = ""
        self._lock = threading.Lock()

    @property
    def interactive(self) -> bool:
        """Whether somebody watches the standard error on a terminal."""
        return _is_terminal(sys.stderr)

    def status(self, text: str) -> None:
        """Draws the status line, in place of the one before; an empty text takes it away."""
        with self._lock:
            if self.interactive:
                text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be taken away
                self._write(sys.stderr, f"{_CLEAR}{text}")
            self._status = text

    def print(self, text: str, *, error: bool = False) -> None:
        """Prints whole lines to the standard output, or to the standard error."""
        with self._lock:
            if self._status and self.interactive:
                self._write(sys.stderr, _CLEAR)
            self._write(sys.stderr if error else sys.stdout, f"{text}\n")
            if self._status and self.interactive:
                self._write(sys.stderr, self._status)

    @staticmethod
    def _write(stream: TextIO | None, text: str) -> None:
        if stream is None:  # under pythonw and some services there is no standard stream
            return
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):  # whoever read it is gone; that is no reason to end a training
            return


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
