"""Functions that read files of a run directory, which may come from an untrusted source."""

from drivetrain._base.lazy import publish
from drivetrain._storage.reading import (
    MAX_LINE_BYTES,
    Fields,
    damage_of,
    is_damage,
    is_number,
    open_regular,
    parse_json,
    too_large,
)
from drivetrain._storage.reports import line_too_long, rank_files, tail_lines

__all__ = [
    "MAX_LINE_BYTES",
    "Fields",
    "damage_of",
    "is_damage",
    "is_number",
    "line_too_long",
    "open_regular",
    "parse_json",
    "rank_files",
    "tail_lines",
    "too_large",
]

publish(__name__)
