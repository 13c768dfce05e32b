"""Renders a run, or a list of runs, as a self-contained HTML page without network access or other files."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from drivetrain import StorageError, __version__
from drivetrain.plugin.reading import damage_of, is_damage
from drivetrain.plugin.storage import Storage
from drivetrain.runs import CurveReader, RunReader

__all__ = ["describe_run", "describe_runs", "encode", "plain", "render", "write_page"]

_ASSETS = Path(__file__).with_name("assets")


def write_page(storage: Storage, path: Path) -> None:
    """Write the HTML page of a run to a file.

    Args:
        storage: the run directory.
        path: the file to write.

    Raises:
        StorageError: the directory contains no run, or its files are damaged.
        OSError: the file cannot be written.
    """
    document = describe_run(storage)
    text = render(encode(document), document["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")  # JSON can contain text that UTF-8 cannot


def describe_run(
    storage: Storage,
    reader: CurveReader | None = None,
    sizes: dict[str, tuple[int, int] | None] | None = None,
    limit_s: float = math.inf,
) -> dict[str, Any]:
    """Return the document of a run's page: the data that the page shows.

    Args:
        storage: the run directory.
        reader: the reader of the run's curves, which reads only the reports since its last update; None reads all.
        sizes: the known sizes of checkpoints, by the checkpoint's name; missing sizes are added to this dict.
        limit_s: the time limit in seconds for reading reports. ``read`` in the document is the fraction of the reports
            that has been read so far.

    Raises:
        StorageError: the directory contains no run, or its files are damaged.
    """
    reader = reader or CurveReader(storage)
    with damage_of(storage.root):
        return _describe_run(storage, reader, {} if sizes is None else sizes, limit_s)


def _describe_run(
    storage: Storage, reader: CurveReader, sizes: dict[str, tuple[int, int] | None], limit_s: float
) -> dict[str, Any]:
    read = reader.update(limit_s)
    details = RunReader(storage).record().details()
    for checkpoint in details["checkpoints"]:
        name = checkpoint["name"]
        if name not in sizes:
            sizes[name] = RunReader(storage).checkpoint_size(name)
        checkpoint["bytes"], checkpoint["files"] = sizes[name] or (None, None)
    return {
        "kind": "run",
        "generated": time.time(),
        "version": __version__,
        **details,
        "reports": {str(rank): count for rank, count in sorted(reader.reports.items())},
        "curves": [
            {"rank": rank, "metric": metric, **curve.export()} for (rank, metric), curve in reader.curves().items()
        ],
        "usage": _read_usage(storage),
        "read": read,
    }


def _read_usage(storage: Storage) -> list[dict[str, Any]]:
    """Return the resource usage, or nothing if its file is damaged or too large: the page is useful without it."""
    try:
        return RunReader(storage).usage()
    except StorageError as error:
        if not is_damage(error):
            raise
        return []


def describe_runs(location: str, summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document of the page of a directory of runs: the data that the page shows.

    Args:
        location: the directory.
        summaries: the summaries of the runs. ``link`` in a summary is the address of the run's page, if there is one.
    """
    return {
        "kind": "runs",
        "generated": time.time(),
        "version": __version__,
        "location": location,
        "runs": [{"link": None, **summary} for summary in summaries],
    }


def render(document: str, title: str) -> str:
    """Return the HTML page that shows a document.

    Args:
        document: the document of :func:`describe_run` or :func:`describe_runs`, encoded by :func:`encode`.
        title: the title of the page.
    """
    style, script = _asset("page.css"), _asset("page.js")
    # The escapes keep the data from closing the script block or being interpreted as HTML.
    data = document.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main><noscript>This page requires JavaScript, which is disabled in this browser.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def encode(document: Mapping[str, Any]) -> str:
    """Return a document as JSON for browsers; non-finite numbers become strings."""
    encoder = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False)
    try:
        return encoder.encode(document)
    except ValueError:
        return encoder.encode(plain(document, str))


def plain(value: Any, replace: Callable[[float], Any] = lambda value: None) -> Any:
    """Return a copy of a value without NaN and infinite numbers, which standard JSON cannot represent.

    Args:
        value: a value made of dicts, lists and scalars.
        replace: returns the replacement for a non-finite number.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else replace(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner, replace) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, replace) for inner in value]
    return value


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
