"""Pickles the frames of a traceback, and recreates a traceback that is printed like the original.

A frame cannot be created directly. So each recreated frame belongs to a statement that is compiled with the file, the
name and the position of the original instruction, and that raises an exception. Therefore the recreated traceback
underlines the same part of the source line.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, TracebackType

__all__ = ["FrameRecord", "as_traceback", "records_of"]


@dataclass(frozen=True, slots=True)
class FrameRecord:
    """The part of a frame that a printed traceback contains.

    Attributes:
        file: the name of the file.
        name: the name of the function.
        qualified_name: its name with those of the classes and functions that contain it.
        module: the name of the module.
        line: the number of the line.
        position: the last line, the first column and the last column of the expression that was evaluated. By default,
            the expression extends beyond the line, so that nothing is underlined.
    """

    file: str
    name: str
    qualified_name: str
    module: str
    line: int
    position: tuple[int, int, int]


def records_of(traceback: TracebackType | None) -> list[FrameRecord]:
    """Return the frames of a traceback, the outermost first."""
    return [_record(entry) for entry in _entries(traceback)]


def as_traceback(records: Sequence[FrameRecord]) -> TracebackType | None:
    """Return a traceback with the given frames."""
    traceback: TracebackType | None = None
    for record in reversed(records):
        try:
            exec(_code(record), {"__name__": record.module, "__file__": record.file})
        except ZeroDivisionError as error:
            entry = list(_entries(error.__traceback__))[-1]
            traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, record.line)
    return traceback


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _record(entry: TracebackType) -> FrameRecord:
    code, line = entry.tb_frame.f_code, entry.tb_lineno or 1
    position = line + 1, 0, 0
    if hasattr(code, "co_positions") and entry.tb_lasti >= 0:  # since Python 3.11
        first, last, column, end = next(itertools.islice(code.co_positions(), entry.tb_lasti // 2, None), (None,) * 4)
        if first == line and last is not None and column is not None and end is not None:
            position = last, column, end
    return FrameRecord(
        file=code.co_filename,
        name=code.co_name,
        qualified_name=getattr(code, "co_qualname", code.co_name),
        module=str(entry.tb_frame.f_globals.get("__name__", "")),
        line=line,
        position=position,
    )


def _code(record: FrameRecord) -> CodeType:
    """Return code that raises a ZeroDivisionError at the position of the record."""
    end_line, column, end_column = record.position
    statement = ast.parse("1 / 0").body[0]
    for node in ast.walk(statement):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno, node.end_lineno = record.line, end_line
            node.col_offset, node.end_col_offset = column, end_column
    code = compile(ast.Module([statement], []), record.file, "exec")
    names = {"co_name": record.name}
    if hasattr(code, "co_qualname"):
        names["co_qualname"] = record.qualified_name
    return code.replace(**names)  # type: ignore[arg-type]
