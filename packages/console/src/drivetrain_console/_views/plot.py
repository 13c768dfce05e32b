"""Draws curves as text, with braille dots or ASCII marks.

ASCII marks are used if the output cannot show braille dots, or has no colors to distinguish several curves.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from drivetrain.plugin.callbacks import printable
from drivetrain_console._views.terminal import amount, can_print, terminal_width

__all__ = ["plot"]

Point = tuple[float, float, float, float]
"""The iteration of a point, and the minimum, mean and maximum of the values there."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row and column."""
_MARKS = "*+xo#@%&"
_COLORS = (34, 33, 32, 31, 35, 36)
_MIN_WIDTH = 30


def plot(
    series: Mapping[str, Sequence[Point]], *, title: str, width: int | None = None, height: int = 16, log: bool = False
) -> str:
    """Return a drawing of curves as lines of text.

    Args:
        series: the points of each curve, by the name of the curve.
        title: the text above the curves: the name of the metric.
        width: the width of the drawing in columns of text; None for the width of the terminal.
        height: the height of the curves in lines of text.
        log: use a logarithmic value axis, and leave out points that include a value of 0 or less.
    """
    curves = [_logarithms(points) if log else list(points) for points in series.values()]
    if not any(curves):
        return f"{printable(title)}: no values to plot"
    bounds = _Bounds.of([point for points in curves for point in points])
    labels = _value_labels(bounds, height, log)
    margin = max(map(len, labels.values())) + 1
    has_colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    has_dots = can_print("⣿") and (has_colors or len(series) == 1)
    columns = max(_MIN_WIDTH, (width or terminal_width()) - 1) - margin - 1
    canvas = _Canvas(columns, height, bounds, has_dots)
    for number, points in enumerate(curves):
        canvas.draw(number, points)

    bar, corner, dash = ("│", "└", "─") if can_print("│└─") else ("|", "+", "-")
    indent = " " * margin
    lines = [printable(title)]
    for row, drawn in enumerate(canvas.lines(has_colors and len(series) > 1)):
        lines.append(f"{labels.get(row, ''):>{margin}}{bar}{drawn}")
    lines.append(f"{indent}{corner}{dash * columns}")
    lines.append(f"{indent} {_report_labels(bounds, columns)}")
    if len(series) > 1:
        lines.append(f"{indent} {_legend(series, has_dots)}")
    return "\n".join(line.rstrip() for line in lines)


class _Bounds(NamedTuple):
    """The ranges of both axes."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Bounds:
        """Return the ranges that contain all points. If all values are equal, widen the range of values around them."""
        low, high = min(point[1] for point in points), max(point[3] for point in points)
        if high <= low:
            low, high = low - (abs(low) * 0.05 or 1), high + (abs(high) * 0.05 or 1)
        return cls(min(point[0] for point in points), max(point[0] for point in points), low, high)


def _logarithms(points: Sequence[Point]) -> list[Point]:
    return [(x, math.log10(low), math.log10(mean), math.log10(high)) for x, low, mean, high in points if low > 0]


def _value_labels(bounds: _Bounds, height: int, log: bool) -> dict[int, str]:
    """Return the labels of the value axis, by the number of the line."""
    values = {0: bounds.high, height // 2: (bounds.low + bounds.high) / 2, height - 1: bounds.low}
    return {row: amount(10**value if log else value) for row, value in values.items()}


def _report_labels(bounds: _Bounds, columns: int) -> str:
    """Return the line of text with the labels of the report axis, one at each end."""
    first, last = amount(bounds.left), amount(bounds.right)
    return f"{first}{last:>{max(1, columns - len(first))}}"


def _legend(names: Iterable[str], has_dots: bool) -> str:
    if has_dots:
        return "  ".join(_colored(number, f"━ {printable(name)}") for number, name in enumerate(names))
    return "  ".join(f"{_MARKS[number % len(_MARKS)]} {printable(name)}" for number, name in enumerate(names))


class _Canvas:
    """A grid of character cells. Each cell holds four rows of two braille dots; if dots are not used, one mark."""

    def __init__(self, width: int, height: int, bounds: _Bounds, has_dots: bool) -> None:
        self._bounds = bounds
        self._has_dots = has_dots
        self._columns, self._rows = (2, 4) if has_dots else (1, 1)
        self._cells: list[list[int]] = [[0] * width for _ in range(height)]
        self._owners: list[list[int]] = [[0] * width for _ in range(height)]

    def draw(self, number: int, points: Sequence[Point]) -> None:
        """Draw a curve through the means of the points, and at each point a vertical line from minimum to maximum."""
        before: tuple[int, int] | None = None
        for x, low, mean, high in points:
            across, bottom = self._place(x, low)
            for down in range(self._place(x, high)[1], bottom + 1):
                self._set(number, across, down)
            here = self._place(x, mean)
            if before is not None:
                self._join(number, before, here)
            before = here

    def lines(self, colored: bool) -> list[str]:
        """Return the lines of text."""
        if not self._has_dots:
            return ["".join(_MARKS[(mark - 1) % len(_MARKS)] if mark else " " for mark in row) for row in self._cells]
        lines = []
        for row, owners in zip(self._cells, self._owners, strict=True):
            characters = [chr(0x2800 + bits) if bits else " " for bits in row]
            if colored:
                spans = groupby(zip(owners, characters, strict=True), lambda pair: pair[0])
                characters = [_colored(owner, "".join(one for _, one in span)) for owner, span in spans]
            lines.append("".join(characters))
        return lines

    def _place(self, x: float, y: float) -> tuple[int, int]:
        """Return the column and row of the dot or mark at a position."""
        left, right, low, high = self._bounds
        columns, rows = len(self._cells[0]) * self._columns - 1, len(self._cells) * self._rows - 1
        across = round((x - left) / ((right - left) or 1) * columns)
        return across, round((high - y) / (high - low) * rows)

    def _join(self, number: int, start: tuple[int, int], end: tuple[int, int]) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for step in range(steps + 1):
            across = start[0] + (end[0] - start[0]) * step / steps
            self._set(number, round(across), round(start[1] + (end[1] - start[1]) * step / steps))

    def _set(self, number: int, across: int, down: int) -> None:
        row, column = down // self._rows, across // self._columns
        if self._has_dots:
            self._cells[row][column] |= _DOTS[down % 4][across % 2]
            self._owners[row][column] = number
        else:
            self._cells[row][column] = number + 1


def _colored(number: int, text: str) -> str:
    return f"\x1b[{_COLORS[number % len(_COLORS)]}m{text}\x1b[0m"
