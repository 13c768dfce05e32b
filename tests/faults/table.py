"""What the tests of faults have measured."""

from typing import NamedTuple


class Row(NamedTuple):
    """One run with a fault in it."""

    fault: str
    moment: str
    runtime: str
    outcome: str
    kind: str
    noticed_s: float | None
    said: str


ROWS: list[Row] = []


def formatted() -> str:
    """The rows as a table of Markdown."""
    lines = ["| " + " | ".join(Row._fields) + " |", "|---" * len(Row._fields) + "|"]
    for row in sorted(ROWS):
        noticed = "" if row.noticed_s is None else f"{row.noticed_s:.2f}"
        lines.append("| " + " | ".join([*row[:5], noticed, row.said.replace("|", "/")[:160]]) + " |")
    return "\n".join(lines)
