"""What a run prints here: whole lines, and below them a few live ones that are redrawn in place.

On a terminal the live lines are drawn below the cursor, which then goes back to where it was. So whatever else is
printed here meanwhile, a user's own progress bar included, is where it would be without them, and overwrites them
rather than getting in between. In a notebook they are one output of the cell, which is replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from drivetrain._base.printable import printable_text
from drivetrain._base.redact import redact

__all__ = ["Console", "cut"]

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_CLEAR_BELOW = "\x1b[J"
_TAKE_AWAY = "\r" + _CLEAR_BELOW  # a bar of somebody else's in the cursor's line too, which is drawn again below
_DOWN = "\x1bD"  # a line down without a change of column; scrolls at the bottom, as a line feed does
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")


class Console:
    """Keeps the live lines, which go to the standard error, out of the way of lines that are printed."""

    def __init__(self) -> None:
        self._bars: tuple[str, ...] = ()
        self._status: tuple[str, ...] = ()
        self._drawn = False
        self._update: Callable[[str], None] | None = None
        self._lock = threading.RLock()

    @property
    def interactive(self) -> bool:
        """Whether somebody watches the standard error on a terminal that can move its cursor."""
        return _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"

    @property
    def notebook(self) -> bool:
        """Whether this is a notebook's kernel."""
        return _notebook_display() is not None

    @property
    def columns(self) -> int:
        """How many characters fit into a live line."""
        return _size().columns - 1  # one more would wrap on some terminals

    def status(self, *lines: str) -> None:
        """Draws the live lines, in place of those before; none takes them away.

        They may have colors, and have to be as wide as :attr:`columns` at most where they do.
        """
        with self._lock:
            self._status = lines
            self._redraw()
            if not self.interactive and self.notebook:
                self._show_in_notebook()

    def bars(self, lines: Sequence[str]) -> None:
        """Draws a worker's progress bars above the other live lines, on a terminal."""
        with self._lock:
            shown = tuple(_CONTROL.sub("", line) for line in lines)
            if shown != self._bars:
                self._bars = shown
                self._redraw()

    def print(self, text: str, *, error: bool = False) -> None:
        """Prints whole lines: a worker's output to the standard output, or a message to the standard error.

        A message may contain text from someone else's run directory, so control characters and credentials are removed.
        """
        if error:
            text = redact(printable_text(text))
        with self._lock:
            self._erase()
            _write(sys.stderr if error else sys.stdout, f"{text}\n")
            self._redraw()

    def _erase(self) -> None:
        if self._drawn:
            _write(sys.stderr, _TAKE_AWAY)
            self._drawn = False

    def _redraw(self) -> None:
        if not self.interactive:
            return
        columns, rows = self.columns, _size().lines
        bars = [cut(line, columns) for line in self._bars]
        status = [line if _COLOR.search(line) else cut(line, columns) for line in self._status]
        lines = [*bars, *status][-max(1, rows - 1) :]
        if not lines:
            self._erase()
            return
        count = len(lines)
        room = _CLEAR_BELOW + count * _DOWN + f"\x1b[{count}A"
        _write(sys.stderr, room + _SAVE + "".join(f"\r\n{line}" for line in lines) + _RESTORE)
        self._drawn = True

    def _show_in_notebook(self) -> None:
        text = "\n".join([*self._bars, *self._status] if self._status else ())
        if self._update is None:
            display = _notebook_display()
            if not text or display is None:
                return
            handle = display({"text/plain": text}, raw=True, display_id=True)
            self._update = lambda text: handle.update({"text/plain": text}, raw=True)
        else:
            self._update(text)


def cut(text: str, columns: int) -> str:
    """As much of a line as fits into so many columns."""
    if text.isascii():
        return text[:columns]
    width = 0
    for place, character in enumerate(text):
        width += 0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        if width > columns:
            return text[:place]
    return text


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # under pythonw and some services there is no standard stream
        return
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):  # whoever read it is gone; that is no reason to end a training
        return


def _size() -> os.terminal_size:
    """The size of the terminal that the standard error is, unless ``COLUMNS`` and ``LINES`` say another."""
    usual = shutil.get_terminal_size()
    if "COLUMNS" in os.environ or sys.stderr is None:
        return usual
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return usual
    return size if size.columns and size.lines else usual


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display``, in a process that is a kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    chosen: Callable[..., Any] = display
    return chosen
