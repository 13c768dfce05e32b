"""The results that are kept in the repository, so that a regression is seen, and the table of the documentation.

``python -m benchmarks NAME --record`` replaces the results of a benchmark in ``records.json``. ``python -m
benchmarks.records`` writes the tables of the README and of three pages of the documentation from this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["TABLES", "previous", "record", "start_table", "table", "with_table", "write_pages"]

RECORDS = Path(__file__).with_name("records.json")
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"
_SECTIONS = {
    "Start and memory": ("start_script", "start_local", "start_ray", "warm_trainer", "memory", "end", "recovery"),
    "Training speed": (
        *("steps", "lightning", "fabric_steps", "transformers_steps", "accelerate_steps", "tensorflow_steps"),
        *("jax_steps", "horovod_steps", "gbdt", "hang_cost"),
    ),
    "Data": ("ingest", "loader"),
    "Reports and checkpoints": (
        *("report", "sustained", "loggers", "soak", "commit", "checkpoint_local", "checkpoint_async", "s3"),
    ),
}
_SHOWN_VERSIONS = ("torch", "lightning", "ray")
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
    """Return the recorded results as sections of Markdown, with a table each."""
    named = {name for names in _SECTIONS.values() for name in names}
    sections = {**_SECTIONS, "Others": [name for name in _read() if name not in named]}
    tables = {title: "".join(f"| {' | '.join(row)} |\n" for row in _rows(names)) for title, names in sections.items()}
    machine = _read()["start_script"]["machine"]
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if name in _SHOWN_VERSIONS
    )
    where = (
        f"Measured on {machine['cores']} cores of a machine without a GPU ({machine['cpu']}, "
        f"{machine['memory_gb']:.0f} GB), with Python {machine['python']}, {versions}.\n\n"
    )
    return where + "\n".join(f"## {title}\n\n{_HEAD}{rows}" for title, rows in tables.items() if rows)


def start_table(docs: str = "") -> str:
    """Return the times until the third step of a script, relative to torchrun, as a table of Markdown.

    Args:
        docs: the prefix of links to pages of the documentation.
    """
    sides = {
        "`python script.py`, with drivetrain": "drivetrain",
        "`drivetrain run script.py`": "drivetrain run",
        f"[`drivetrain run script.py`, with a warm server]({docs}command-line.md#run-a-script-again-at-once)": (
            "drivetrain run, warm"
        ),
    }
    rows = "".join(f"| {shown} | {_median_of_third_step(side):.2g} |\n" for shown, side in sides.items())
    return f"| command | time |\n|---|---|\n| `torchrun script.py` | 1 |\n{rows}"


def _median_of_third_step(side: str) -> float:
    name = f"process start -> third step: {side} at most "
    return next(float(found["median"]) for key, found in previous("start_script").items() if key.startswith(name))


def _rows(benchmarks: Sequence[str]) -> Iterator[Sequence[str]]:
    records = _read()
    for benchmark in benchmarks:
        for name, result in records.get(benchmark, {"results": {}})["results"].items():
            quantity, _, goal = name.rpartition(": ")
            numbers = [_short(result[key]) for key in ("median", "min", "max")]
            met = "yes" if result["met"] else "**no**"
            yield (
                f"`{benchmark}`",
                quantity,
                f"{numbers[0]} {result['unit']}".strip(),
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


def with_table(text: str, content: str) -> str:
    """Return the text of a page with another table."""
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", re.DOTALL)
    return pattern.sub(lambda _: content, text)


def write_pages() -> None:
    """Write the tables into the pages of the documentation."""
    for page, content in TABLES.items():
        page.write_text(with_table(page.read_text(), content()))


TABLES: Mapping[Path, Callable[[], str]] = {
    DOCS / "benchmarks.md": table,
    DOCS / "why.md": start_table,
    DOCS / "index.md": start_table,
    DOCS.parent / "README.md": partial(start_table, "docs/"),
}
"""The function that returns the table of each page."""


if __name__ == "__main__":
    write_pages()
