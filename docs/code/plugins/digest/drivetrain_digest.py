"""The view `digest`, which shows the metrics of a run as a Markdown table."""

from collections.abc import Sequence

from drivetrain.plugin.storage import Storage
from drivetrain.runs import RunReader


def show_digest(storage: Storage, *, metrics: Sequence[str] = (), rank: int = 0) -> str:
    """Return a Markdown table with one row per report."""
    columns = RunReader(storage).columns(rank)
    names = metrics or [name for name in columns if not name.startswith("_")]
    if not names:
        return "The run has no metrics."
    rows = zip(*(columns[name] for name in names), strict=True)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
