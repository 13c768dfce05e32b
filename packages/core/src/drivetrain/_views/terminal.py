"""Tables and curves as text, as wide as the terminal."""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

__all__ = ["amount", "bytes_text", "duration", "moment", "plot", "table", "terminal_width", "wrapped"]

_WIDTH_OF_A_PIPE = 200
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character's dots, by row and column."""
_MARKS = "*+xo#@%&"
_COLOURS = (34, 33, 32, 31, 35, 36)
_CONTROLS = {**dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}"), 9: " ", 10: " "}
_MIN_CELL = 8


def terminal_width() -> int:
    """Columns of the terminal; generous where the output goes elsewhere."""
    return shutil.get_terminal_size((_WIDTH_OF_A_PIPE, 24)).columns


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, spare: Sequence[str] = ()
) -> str:
    """Rows below their headings, each column as wide as it has to be.

    Args:
        header: the headings.
        rows: the cells.
        width: columns of text that there are; None for the terminal's.
        spare: headings of columns that are left out, from the last on, where there is no room. Then the widest
            columns are cut.
    """
    width = width or terminal_width()
    rows = [[printable(cell) for cell in row] for row in rows]
    shown = list(range(len(header)))
    widths = [max(len(row[column]) for row in [header, *rows]) for column in shown]

    def too_wide() -> int:
        return sum(widths[column] for column in shown) + 2 * (len(shown) - 1) - width

    for name in reversed(spare):
        if too_wide() > 0:
            shown.remove(list(header).index(name))
    while (excess := too_wide()) > 0:
        widest = max(shown, key=lambda column: widths[column])
        others = sorted((widths[column] for column in shown), reverse=True)[1:2]
        if widths[widest] <= _MIN_CELL:
            break
        widths[widest] = max(_MIN_CELL, widths[widest] - excess, min(others[0] if others else 0, widths[widest] - 1))
    lines = []
    for row in [header, *rows]:
        cells = [_cut(row[column], widths[column]).ljust(widths[column]) for column in shown]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def wrapped(start: str, text: str) -> str:
    """A text that goes on below itself, right of how its first line starts."""
    width = max(terminal_width(), len(start) + 30)
    return textwrap.fill(
        printable(text), width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def printable(text: str) -> str:
    """A text without characters that would control a terminal."""
    return text.translate(_CONTROLS)


def plot(
    series: Mapping[str, Sequence[tuple[float, float, float, float]]],
    *,
    title: str,
    width: int | None = None,
    height: int = 16,
    log: bool = False,
) -> str:
    """Curves in the dots of braille characters; in letters where the output has no such characters, or no colours.

    Args:
        series: by name, points of x, and the least, mean and greatest value there, which are all drawn.
        title: what the values are.
        width: columns of text; None for the terminal's.
        height: lines of text for the curves.
        log: a logarithmic axis of values; what is not above zero is left out.
    """
    width = max(30, (width or terminal_width()) - 1)
    scaled = {name: _scale(points, log) for name, points in series.items()}
    everything = [point for points in scaled.values() for point in points]
    if not everything:
        return f"{title}: nothing to draw"
    left, right = min(point[0] for point in everything), max(point[0] for point in everything)
    low, high = min(point[1] for point in everything), max(point[3] for point in everything)
    if high <= low:
        low, high = low - (abs(low) * 0.05 or 1), high + (abs(high) * 0.05 or 1)
    labels = {0: high, height // 2: (low + high) / 2, height - 1: low}
    texts = {row: amount(10**value if log else value) for row, value in labels.items()}
    margin = max(map(len, texts.values())) + 1
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    canvas = _Canvas(width - margin - 1, height, _can_print("⣿") and (colours or len(series) == 1))
    for name, points in scaled.items():
        canvas.draw(list(scaled).index(name), points, (left, right, low, high))
    bar, corner, dash = ("│", "└", "─") if _can_print("│└─") else ("|", "+", "-")
    lines = [printable(title)]
    drawn = canvas.lines(colours and len(series) > 1)
    lines += [f"{texts.get(row, ''):>{margin}}{bar}{line}" for row, line in enumerate(drawn)]
    lines.append(f"{'':>{margin}}{corner}{dash * canvas.width}")
    end = amount(right)
    lines.append(f"{'':>{margin}} {amount(left)}{end:>{max(1, canvas.width - len(amount(left)))}}")
    if len(series) > 1:
        names = [
            _coloured(i, f"━ {name}") if canvas.has_dots else f"{_MARKS[i % len(_MARKS)]} {name}"
            for i, name in enumerate(series)
        ]
        lines.append(f"{'':>{margin}} {'  '.join(names)}")
    return "\n".join(line.rstrip() for line in lines)


class _Canvas:
    """Dots, four by two in a character where that can be printed."""

    def __init__(self, width: int, height: int, has_dots: bool) -> None:
        self.width = width
        self.has_dots = has_dots
        self._columns, self._rows = (2, 4) if has_dots else (1, 1)
        self._cells: list[list[int]] = [[0] * width for _ in range(height)]
        self._owners: list[list[int]] = [[0] * width for _ in range(height)]

    def draw(
        self,
        number: int,
        points: Sequence[tuple[float, float, float, float]],
        bounds: tuple[float, float, float, float],
    ) -> None:
        left, right, low, high = bounds
        columns, rows = self.width * self._columns - 1, len(self._cells) * self._rows - 1

        def place(x: float, y: float) -> tuple[int, int]:
            across = round((x - left) / ((right - left) or 1) * columns)
            return across, round((high - y) / (high - low) * rows)

        before: tuple[int, int] | None = None
        for x, least, mean, most in points:
            across, bottom = place(x, least)
            for down in range(place(x, most)[1], bottom + 1):
                self._set(number, across, down)
            here = place(x, mean)
            if before is not None:
                self._join(number, before, here)
            before = here

    def lines(self, coloured: bool) -> list[str]:
        if not self.has_dots:
            return ["".join(_MARKS[(mark - 1) % len(_MARKS)] if mark else " " for mark in row) for row in self._cells]
        found = []
        for row, owners in zip(self._cells, self._owners, strict=True):
            characters = [chr(0x2800 + bits) if bits else " " for bits in row]
            if coloured:
                spans = groupby(zip(owners, characters, strict=True), lambda pair: pair[0])
                characters = [_coloured(owner, "".join(one for _, one in span)) for owner, span in spans]
            found.append("".join(characters))
        return found

    def _join(self, number: int, start: tuple[int, int], end: tuple[int, int]) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for step in range(steps + 1):
            across = start[0] + (end[0] - start[0]) * step / steps
            self._set(number, round(across), round(start[1] + (end[1] - start[1]) * step / steps))

    def _set(self, number: int, across: int, down: int) -> None:
        row, column = down // self._rows, across // self._columns
        if self.has_dots:
            self._cells[row][column] |= _DOTS[down % 4][across % 2]
            self._owners[row][column] = number
        else:
            self._cells[row][column] = number + 1


def amount(value: Any) -> str:
    """A number in five digits or so; other values as they are."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "-" if value is None else printable(str(value))


def _coloured(number: int, text: str) -> str:
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"


def bytes_text(size: float | None) -> str:
    """A number of bytes in the unit that fits."""
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration(seconds: float | None) -> str:
    """A time span in the units that fit."""
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
    """Date and time of this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time)) if unix_time else "-"


def _scale(points: Sequence[tuple[float, float, float, float]], log: bool) -> list[tuple[float, float, float, float]]:
    if not log:
        return list(points)
    return [(x, math.log10(least), math.log10(mean), math.log10(most)) for x, least, mean, most in points if least > 0]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}{'…' if _can_print('…') else '.'}"


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
