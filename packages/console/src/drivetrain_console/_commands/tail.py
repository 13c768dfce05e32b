"""``drivetrain runs tail``: follows the reports of a run, or the output of its workers."""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Iterator

from drivetrain import StorageError
from drivetrain.plugin.callbacks import reported_metrics
from drivetrain.plugin.files import log_name, result_file
from drivetrain.plugin.reading import MAX_LINE_BYTES, Fields, line_too_long, parse_json, tail_lines
from drivetrain.plugin.storage import Storage
from drivetrain.runs import RunReader
from drivetrain_console._commands.output import BAD, OK, Commands, MissingError, add_command, find_run, json_text, write
from drivetrain_console._views.terminal import amount, moment

__all__ = ["add_tail"]

_POLL_S = 0.25
_REMOTE_POLL_S = 10.0
_MAX_PART_BYTES = 1 << 16  # the length of the shown end of a log line that is too long


def add_tail(commands: Commands) -> None:
    """Add ``runs tail``."""
    parser = add_command(
        commands,
        "tail",
        _tail,
        "show the last reports of a run, and follow new reports until it ends",
        "  drivetrain runs tail my_run\n  drivetrain runs tail my_run --logs --rank 1\n"
        "  drivetrain runs tail my_run --no-follow -n 1 --json",
    )
    parser.add_argument("run", help="a run's directory, URI or name")
    parser.add_argument(
        "-n", "--lines", type=int, default=10, metavar="N", help="the number of previous lines to show (default: 10)"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the rank (default: 0)")
    parser.add_argument("--logs", action="store_true", help="show the output of the rank instead of its reports")
    parser.add_argument("--no-follow", dest="follow", action="store_false", help="exit after the existing lines")


def _tail(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    name = f"logs/{log_name(arguments.rank)}" if arguments.logs else result_file(arguments.rank)
    lines = _follow(storage, name, arguments.lines, arguments.follow, is_log=arguments.logs)
    if not storage.exists(name):
        follows = arguments.follow and RunReader(storage).record().is_live
        is_in_parquet = not arguments.logs and arguments.rank in RunReader(storage).ranks()
        if is_in_parquet and follows:
            raise MissingError(
                f"runs tail: cannot follow the reports of rank {arguments.rank}, which are only in Parquet files. To "
                "show those that were written so far, add --no-follow"
            )
        if is_in_parquet:
            lines = _lines_in_parquet(storage, arguments.rank, arguments.lines)
        elif not follows:
            content = "output" if arguments.logs else "reports"
            raise MissingError(f"runs tail: expected a rank with {content}, but there is no {name} in {storage.root}")
    for line in lines:
        if arguments.logs:
            text = _last_shown(line).decode(errors="replace")
            write(json_text({"rank": arguments.rank, "line": text}) if arguments.json else text)
        else:
            text = line.decode(errors="replace")
            write(_report_json(text) if arguments.json else _report_text(text))
    return BAD if arguments.follow and RunReader(storage).record().status == "failed" else OK


def _lines_in_parquet(storage: Storage, rank: int, count: int) -> Iterator[bytes]:
    """Yield the last reports of a rank that only the Parquet files of a run contain, as lines of JSON."""
    for report in deque(RunReader(storage).reports(rank), maxlen=max(0, count)):
        yield json_text(report).encode()


def _follow(storage: Storage, name: str, count: int, follow: bool, *, is_log: bool) -> Iterator[bytes]:
    """Yield the last lines of a file. If ``follow`` is True, also yield the lines that are added until the run ends."""
    shown = tail_lines(storage, name, count, cut=is_log) if count > 0 else []
    position = _end_of_complete_lines(storage, name)
    yield from shown
    while follow:
        is_live = RunReader(storage).record().is_live  # checked before reading, so that the last lines are not missed
        start = -1
        while position > start:  # one read may not return all new lines
            start = position
            for line, end in _lines_from(storage, name, position, is_log=is_log):
                position = end
                yield line
        if not is_live:
            return
        time.sleep(_POLL_S if storage.is_local else _REMOTE_POLL_S)


def _end_of_complete_lines(storage: Storage, name: str) -> int:
    """Return the size of a file without an incomplete last line, or with that line if it is too long."""
    try:
        with storage.open_file(name) as file:
            end = file.seek(0, os.SEEK_END)
            size = end
            while end and size - end < MAX_LINE_BYTES:
                start = max(0, end - (1 << 16))
                file.seek(start)
                if (cut := file.read(end - start).rfind(b"\n")) >= 0:
                    return start + cut + 1
                end = start
            return size if size - end >= MAX_LINE_BYTES else 0
    except FileNotFoundError:
        return 0


def _lines_from(storage: Storage, name: str, position: int, *, is_log: bool) -> Iterator[tuple[bytes, int]]:
    """Yield the complete lines after a position, each with the position of its end.

    If the file has become shorter than the position, start at the new end of the file. A log line that is too long,
    such as a progress bar, is read in parts, and only the end of each part is yielded.

    Raises:
        StorageError: a line is too long, and the file is not a log.
    """
    try:
        with storage.open_file(name) as file:
            position = min(position, file.seek(0, os.SEEK_END))
            file.seek(position)
            data = file.read(MAX_LINE_BYTES)  # the next call reads the rest
    except FileNotFoundError:
        return
    if len(data) >= MAX_LINE_BYTES and b"\n" not in data:
        if not is_log:
            raise line_too_long(storage.path(name))
        end = data.rfind(b"\r") + 1 or len(data)  # end the part after a complete state of a progress bar
        yield data[max(0, end - _MAX_PART_BYTES) : end], position + end
        return
    for line in data.split(b"\n")[:-1]:
        position += len(line) + 1
        yield line, position


def _last_shown(line: bytes) -> bytes:
    """Return the part of a line that remains visible on a terminal: of a progress bar, its last state."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return shown if len(line) < MAX_LINE_BYTES else shown[-_MAX_PART_BYTES:]


def _report_json(line: str) -> str:
    """Return a report as JSON without control characters. A damaged line is returned as a JSON string."""
    try:
        return json_text(parse_json(line, ""))
    except StorageError:
        return json_text(line)


def _report_text(line: str) -> str:
    try:
        report = Fields(parse_json(line, ""), "")
        clock = moment(report.number("_timestamp", 0)).rpartition(" ")[2]
    except StorageError:
        return line
    shown = "  ".join(f"{name} {amount(value)}" for name, value in reported_metrics(report.values).items())
    return f"{clock}  {amount(report.values.get('_training_iteration', '?')):>6}  {shown}"
