"""``drivetrain explain``: shows the explanation of an error code: the cause, an example and the remedy.

The explanations are in ``errors.md``, which is also a page of the documentation. The code of an error is the beginning
of its message, where the error is raised: ``"[DT-104] train_loop_per_worker: expected ..."``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from dataclasses import dataclass
from importlib import resources

from drivetrain_console._commands.output import OK, Commands, MissingError, add_command, emit

__all__ = ["Explanation", "add_explain", "load_explanations"]

_HEADING = re.compile(r"^### (DT-\d{3}): (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of an error code.

    Attributes:
        code: the code, such as ``"DT-104"``.
        title: a summary of the error in one line.
        text: the cause, an example and the remedy, in Markdown.
    """

    code: str
    title: str
    text: str

    def plain(self, width: int) -> str:
        """Return the explanation for a terminal of ``width`` characters. Code is indented instead of fenced."""
        prose = _FENCED.split(self.text)  # prose and code alternate
        parts = [f"{self.code}: {self.title}"]
        for number, part in enumerate(prose):
            if number % 2:
                parts.append(textwrap.indent(part.rstrip("\n"), "    "))
            else:
                parts += [textwrap.fill(paragraph, width) for paragraph in part.strip().split("\n\n") if paragraph]
        return "\n\n".join(parts)


def load_explanations() -> dict[str, Explanation]:
    """Return all explanations, by error code."""
    page = resources.files("drivetrain_console._commands").joinpath("errors.md").read_text(encoding="utf-8")
    page = re.sub(r"^## .*$", "", page, flags=re.MULTILINE)
    _, *parts = _HEADING.split(page)
    sections = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {code: Explanation(code, title, text.strip()) for code, title, text in sections}


def add_explain(commands: Commands) -> None:
    """Add ``explain``."""
    parser = add_command(
        commands,
        "explain",
        _explain,
        "explain an error code: its cause, an example and the remedy",
        "  drivetrain explain DT-104\n  drivetrain explain        (lists all codes)",
    )
    parser.add_argument("code", nargs="?", help="the code in the error message; without it, all codes are listed")


def _explain(arguments: argparse.Namespace) -> int:
    explanations = load_explanations()
    if arguments.code is None:
        listed = [{"code": code, "title": found.title} for code, found in explanations.items()]
        emit(arguments, listed, lambda: "\n".join(f"{one['code']}  {one['title']}" for one in listed))
        return OK
    number = arguments.code.strip("[]").upper().removeprefix("DT-")
    explanation = explanations.get(f"DT-{number}")
    if explanation is None:
        raise MissingError(
            f"explain: expected an error code such as DT-104, got {arguments.code!r}. "
            "`drivetrain explain` lists all codes"
        )
    data = {"code": explanation.code, "title": explanation.title, "text": explanation.text}
    width = min(shutil.get_terminal_size().columns, 100)
    emit(arguments, data, lambda: explanation.plain(width))
    return OK
