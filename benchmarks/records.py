"""The results that are kept in the repository, so that a regression is seen, and the table of the documentation.

``python -m benchmarks NAME --record`` replaces the results of a benchmark in ``records.json``. ``python -m
benchmarks.records`` writes the table of ``docs/benchmarks.md`` from this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BEGIN", "END", "PAGE", "previous", "record", "table", "write_page"]

RECORDS = Path(__file__).with_name("records.json")
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"
_HEAD = "| benchmark | quantity | median | range | runs | goal | met |\n|---|---|---|---|---|---|---|\n"


def previous(benchmark: str) -> Mapping[str, Any]:
    """Return the recorded result of each goal of a benchmark, by the name of the quantity and the goal."""
    found: dict[str, Any] = _read().get(benchmark, {}).get("results", {})
    return found


def record(benchmark: str, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Replace the results of a benchmark."""
    records = _read()
    records[benchmark] = {"machine": machine, "results": results}
    RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


def table() -> str:
    """Return the recorded results as a table of Markdown."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in _rows())


def _rows() -> Iterator[Sequence[str]]:
    for benchmark, found in _read().items():
        for name, result in found["results"].items():
            quantity, _, goal = name.partition(": ")
            numbers = [_short(result[key]) for key in ("median", "min", "max")]
            met = "yes" if result["met"] else "**no**"
            yield (
                f"`{benchmark}`",
                quantity,
                numbers[0],
                f"{numbers[1]} to {numbers[2]}",
                str(result["runs"]),
                goal,
                met,
            )


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return found


def write_page() -> None:
    """Write the table into the page of the documentation."""
    text = PAGE.read_text()
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: table(), text))


if __name__ == "__main__":
    write_page()
