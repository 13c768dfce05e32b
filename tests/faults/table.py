"""The outcome of each fault, as a table.

A test records its row as a property of its report, so that the row reaches the summary from a parallel worker too.
"""

from collections.abc import Iterable
from typing import NamedTuple

PROPERTY = "fault"


class Row(NamedTuple):
    """One run with a fault."""

    fault: str
    moment: str
    runtime: str
    outcome: str
    kind: str
    noticed_s: float | None
    message: str


def formatted(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| " + " | ".join(Row._fields) + " |", "|---" * len(Row._fields) + "|"]
    for row in sorted(rows):
        noticed = "" if row.noticed_s is None else f"{row.noticed_s:.2f}"
        lines.append("| " + " | ".join([*row[:5], noticed, row.message.replace("|", "/")[:160]]) + " |")
    return "\n".join(lines)
