"""The output of a run on this terminal: printed lines, and live lines below them that are redrawn in place.

On a terminal the live lines are drawn below the cursor, which then returns to its previous position. Other output, such
as a user's own progress bar, therefore appears in its usual place, and overwrites the live lines instead of mixing with
them. In a notebook the live lines are a single output of the cell, and every update replaces that output.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TextIO

from drivetrain._base.printable import printable_text
from drivetrain._base.redact import redact

__all__ = ["Console", "truncate"]

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_CLEAR_BELOW = "\x1b[J"
_ERASE = "\r" + _CLEAR_BELOW  # also erases other code's progress bar on this line; that code redraws it further down
_DOWN = "\x1bD"  # moves one line down in the same column; scrolls at the bottom, like a line feed
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")


class Console:
    """Prints lines without mixing them with the live lines, which are drawn on stderr.

    Args:
        name: the name of the run whose output is printed.
    """

    _in_use: ClassVar[list[Console]] = []

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._bars: tuple[str, ...] = ()
        self._status: tuple[str, ...] = ()
        self._drawn = False
        self._update: Callable[[str], None] | None = None
        self._lock = threading.RLock()

    @property
    def interactive(self) -> bool:
        """True if stderr is a terminal that can move its cursor."""
        return _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"

    @property
    def notebook(self) -> bool:
        """True if this process is a notebook's kernel."""
        return _notebook_display() is not None

    @property
    def columns(self) -> int:
        """The maximum number of characters in a live line."""
        return _size().columns - 1  # some terminals wrap a line that fills all columns

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count this console, during a ``with`` block, as one of those to which runs of this process print."""
        self._in_use.append(self)
        try:
            yield
        finally:
            self._in_use.remove(self)

    def prefix(self, rank: int) -> str:
        """Return what precedes a line of a rank's output: the rank, and the run if there are several at a time."""
        return f"[{self.name} rank {rank}] " if len(self._in_use) > 1 else f"[rank {rank}] "

    def status(self, *lines: str) -> None:
        """Replace the status lines, which are the live lines below the progress bars. Without arguments, remove them.

        A line may contain color codes. Such a line is not truncated, so it must not be wider than :attr:`columns`.
        """
        with self._lock:
            self._status = lines
            self._redraw()
            if not self.interactive and self.notebook:
                self._show_in_notebook()

    def bars(self, lines: Sequence[str]) -> None:
        """Replace the progress bars of a worker, which are the live lines above the status lines.

        A terminal shows them at once. A notebook shows them with the next :meth:`status`.
        """
        with self._lock:
            shown = tuple(_CONTROL.sub("", line) for line in lines)
            if shown != self._bars:
                self._bars = shown
                self._redraw()

    def print(self, text: str, *, error: bool = False) -> None:
        """Print whole lines: a worker's output to stdout or, with ``error``, a message to stderr.

        A message may contain text from another user's run directory, so its control characters and credentials are
        replaced.
        """
        if error:
            text = redact(printable_text(text))
        with self._lock:
            self._erase()
            _write(sys.stderr if error else sys.stdout, f"{text}\n")
            self._redraw()

    def _erase(self) -> None:
        if self._drawn:
            _write(sys.stderr, _ERASE)
            self._drawn = False

    def _redraw(self) -> None:
        if not self.interactive:
            return
        columns, rows = self.columns, _size().lines
        bars = [truncate(line, columns) for line in self._bars]
        status = [line if _COLOR.search(line) else truncate(line, columns) for line in self._status]
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


def truncate(text: str, columns: int) -> str:
    """Return the longest prefix of a line that fits into a number of columns."""
    if text.isascii():
        return text[:columns]
    width = 0
    for place, character in enumerate(text):
        width += 0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        if width > columns:
            return text[:place]
    return text


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # pythonw and some services have no standard streams
        return
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):  # a closed stream must not fail the training
        return


def _size() -> os.terminal_size:
    """Return the size of stderr's terminal. If ``COLUMNS`` is set, return the size in ``COLUMNS`` and ``LINES``."""
    default = shutil.get_terminal_size()
    if "COLUMNS" in os.environ or sys.stderr is None:
        return default
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return default
    return size if size.columns and size.lines else default


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _notebook_display() -> Callable[..., Any] | None:
    """Return IPython's ``display`` if this process is a notebook's kernel, and None otherwise."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    typed_display: Callable[..., Any] = display
    return typed_display
