"""Renders the state of a run as a small panel. ``rich`` creates the text, but does not control the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drivetrain_console._progress.status import Metric, Status, clock, short

__all__ = ["render"]

_MAX_COLUMNS = 120
_FRAME = 4
_BAR = 24
_MIN_BAR = 8


def render(status: Status, columns: int) -> list[str]:
    """Return the lines of the panel, with colors unless ``NO_COLOR`` is set.

    Args:
        status: the state of the run.
        columns: the width of a line in characters.
    """
    width = min(columns, _MAX_COLUMNS)
    title = Text(status.name, style="bold")
    title.append(f" · {status.state} · {clock(status.elapsed_s)}", style="not bold")
    rows: list[RenderableType] = [
        row
        for row in (
            _progress(status, width - _FRAME),
            _metrics(status.metrics, width - _FRAME),
            Text(" · ".join(status.storage()), style="dim"),
        )
        if not isinstance(row, Text) or row
    ]
    for row in rows:
        if isinstance(row, Text):
            row.no_wrap, row.overflow = True, "ellipsis"
    panel = Panel(Group(*rows), title=title, title_align="left", box=ROUNDED, border_style="dim", width=width)
    text = io.StringIO()
    # The color system is explicit because rich cannot detect it without a terminal.
    Console(file=text, force_terminal=True, color_system="standard", width=width, highlight=False).print(panel)
    return text.getvalue().splitlines()


def _progress(status: Status, columns: int) -> RenderableType:
    """Return the counters, with a progress bar if the fraction is known and there is room."""
    text = Text(" · ".join(status.progress()), no_wrap=True, overflow="ellipsis")
    if status.fraction is None:
        return text
    percent = f"{100 * status.fraction:.0f}%"
    room = columns - text.cell_len - len(percent) - 2
    if room < _MIN_BAR:
        return Text(f"{percent} · ", no_wrap=True, overflow="ellipsis") + text
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=1, completed=status.fraction, width=min(room, _BAR)), percent, text)
    return row


def _metrics(metrics: Sequence[Metric], columns: int) -> Text:
    """Return as many metrics as fit, each with the direction of its change."""
    line = Text()
    for metric in metrics:
        part = Text(f"{metric.name} ", style="dim").append(short(metric.value), style="not dim bold")
        if metric.change:
            part.append(" ↑" if metric.change > 0 else " ↓", style="not dim")
        if line.cell_len + part.cell_len + 2 > columns:
            break
        line = line + "  " + part if line else part
    return line
