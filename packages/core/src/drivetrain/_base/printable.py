"""Makes text from other sources safe to print, by replacing the characters that control a terminal."""

from __future__ import annotations

import re

__all__ = ["printable", "printable_text"]

_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they reorder the displayed text
_SURROGATES = range(0xD800, 0xE000)  # they cannot be encoded, so printing one raises
_REPLACED = dict.fromkeys([*range(32), *range(127, 160), *_BIDIRECTIONAL, *_SURROGATES], "\N{REPLACEMENT CHARACTER}")
_IN_A_LINE = {**_REPLACED, 9: " ", 10: " "}
_IN_A_TEXT = {code: _REPLACED[code] for code in _REPLACED if code not in (9, 10)}
_COLOR = re.compile(r"(\x1b\[(?:0|3[0-7])m)")


def printable(text: str) -> str:
    """Return a text as one line: tabs and newlines become spaces, and other control characters are replaced."""
    return text.translate(_IN_A_LINE)


def printable_text(text: str, *, colored: bool = False) -> str:
    """Return a text in which all control characters except tabs and newlines are replaced.

    Args:
        text: the text, which may have several lines.
        colored: keep the escape sequences that set one of the eight foreground colors or reset the color.
    """
    if colored:
        parts = _COLOR.split(text)  # every second part is a color
        return "".join(part if number % 2 else printable_text(part) for number, part in enumerate(parts))
    return text.translate(_IN_A_TEXT)
