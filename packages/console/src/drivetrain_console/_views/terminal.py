"""Formats tables, numbers and times as text for the width of the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from drivetrain.plugin.callbacks import printable

__all__ = [
    "amount",
    "bytes_text",
    "can_print",
    "duration",
    "moment",
    "table",
    "terminal_width",
    "wrapped",
]

_WIDTH_WITHOUT_TERMINAL = 200
_MIN_CELL = 8


def terminal_width() -> int:
    """Return the width of the terminal in columns, or a large width if the output is not a terminal."""
    return shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    droppable: Sequence[str] = (),
    wrap: bool = False,
) -> str:
    """Return a table as text. Columns are only as wide as their cells require.

    Args:
        header: the headings.
        rows: the cells.
        width: the available width in columns of text; None for the width of the terminal.
        droppable: headings of columns that are dropped if the table is too wide, starting with the last. If that is not
            enough, the widest columns are made narrower, and long cells are truncated.
        wrap: continue long cells on further lines instead of truncating them.
    """
    width = width or terminal_width()
    names = list(header)
    header = [printable(cell) for cell in header]
    rows = [[printable(cell) for cell in row] for row in rows]
    shown = list(range(len(header)))
    widths = [max(len(row[column]) for row in [header, *rows]) for column in shown]

    def too_wide() -> int:
        return sum(widths[column] for column in shown) + 2 * (len(shown) - 1) - width

    for name in reversed(droppable):
        column = names.index(name)
        if too_wide() > 0 and column in shown:  # a metric may have the same name as another column
            shown.remove(column)
    while (excess := too_wide()) > 0:
        widest = max(shown, key=lambda column: widths[column])
        others = sorted((widths[column] for column in shown), reverse=True)[1:2]
        if widths[widest] <= _MIN_CELL:
            break
        widths[widest] = max(_MIN_CELL, widths[widest] - excess, min(others[0] if others else 0, widths[widest] - 1))
    fit = _wrap if wrap else _cut
    lines = []
    for row in [header, *rows]:
        cells = [fit(row[column], widths[column]) for column in shown]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [part.ljust(widths[column]) for part, column in zip(parts, shown, strict=True)]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def wrapped(prefix: str, text: str) -> str:
    """Return ``prefix`` and a text, wrapped to the width of the terminal; later lines are indented like the text."""
    width = max(terminal_width(), len(prefix) + 30)
    return textwrap.fill(
        printable(text), width, initial_indent=prefix, subsequent_indent=" " * len(prefix), break_on_hyphens=False
    )


def amount(value: Any) -> str:
    """Return a value as text: a float with five significant digits, and None as ``-``."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "-" if value is None else printable(str(value))


def bytes_text(size: float | None) -> str:
    """Return a number of bytes as text with a suitable unit; ``-`` for None."""
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Return a duration as text with suitable units; ``-`` for None."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(unix_time: float | None) -> str:
    """Return a Unix time as date and time in the local time zone; ``-`` if it is unknown or out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time)) if unix_time else "-"
    except (ValueError, OverflowError, OSError):
        return "-"


def _cut(text: str, width: int) -> list[str]:
    return [text if len(text) <= width else f"{text[: width - 1]}{'…' if can_print('…') else '.'}"]


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def can_print(text: str) -> bool:
    """Return True if the encoding of standard output can represent all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
