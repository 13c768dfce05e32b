"""Displays objects in notebooks as a small HTML table that loads no external resources."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from drivetrain._base.redact import redact

__all__ = ["ShowsFields", "as_table"]

_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0;"
_MAX_CHARACTERS = 300


def as_table(title: str, rows: Mapping[str, object], note: str = "") -> str:
    """Return HTML with a title, a table below the title, and a note below the table.

    Args:
        title: the heading.
        rows: a mapping from the name of each row to its value. Long values are truncated, and credentials in URIs are
            replaced.
        note: the line below the table; empty for no line.
    """
    cells = "".join(
        f'<tr><th style="{_CELL}font-weight:normal;opacity:.7">{html.escape(name)}</th>'
        f'<td style="{_CELL}">{html.escape(_short(value))}</td></tr>'
        for name, value in rows.items()
    )
    below = f'<div style="opacity:.7">{html.escape(note)}</div>' if note else ""
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table>{below}</div>"


class ShowsFields:
    """Base of the configuration dataclasses. Notebooks show the fields whose values differ from the defaults."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows, defaults = {}, 0
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, field.name)
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if value == default:
                defaults += 1
            else:
                rows[field.name] = value if isinstance(value, str) else repr(value)
        note = f"{defaults} fields have their defaults" if defaults else ""
        return as_table(type(self).__name__, rows, note)


def _short(value: Any) -> str:
    text = redact(str(value))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"
