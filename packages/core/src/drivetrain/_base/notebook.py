"""What notebooks show of an object: a small table, without anything from elsewhere."""

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
    """HTML of a title and rows below it.

    Args:
        title: what it is.
        rows: values by name; what is long is cut, and credentials in URIs are replaced.
        note: a line below.
    """
    cells = "".join(
        f'<tr><th style="{_CELL}font-weight:normal;opacity:.7">{html.escape(name)}</th>'
        f'<td style="{_CELL}">{html.escape(_short(value))}</td></tr>'
        for name, value in rows.items()
    )
    below = f'<div style="opacity:.7">{html.escape(note)}</div>' if note else ""
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table>{below}</div>"


class ShowsFields:
    """Base of the dataclasses of configuration: in notebooks they show what differs from the defaults."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows, left_out = {}, 0
        for one in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            if value == default:
                left_out += 1
            else:
                rows[one.name] = value if isinstance(value, str) else repr(value)
        note = f"{left_out} fields have their defaults" if left_out else ""
        return as_table(type(self).__name__, rows, note)


def _short(value: Any) -> str:
    text = redact(str(value))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"
