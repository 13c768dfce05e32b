"""Reading the files with reports, and other files of JSON lines, in a run directory."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import result_file

__all__ = ["last_report", "rank_files", "read_lines", "tail_lines"]

_RESULT_FILE = re.compile(r"result(?:_rank_(\d+))?\.json")
_TAIL_BYTES = 1 << 16


def rank_files(storage: Storage) -> dict[int, str]:
    """The files with the reports of each rank."""
    matches = [match for name in storage.list_names()[1] if (match := _RESULT_FILE.fullmatch(name))]
    return {int(match[1] or 0): match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))}


def last_report(storage: Storage, rank: int = 0) -> dict[str, Any] | None:
    """The last report of a rank that is on storage; None without any. Of a local file only the end is read."""
    for line in reversed(tail_lines(storage, result_file(rank), 2)):
        with contextlib.suppress(ValueError):
            report: dict[str, Any] = json.loads(line)
            return report
    return None


def tail_lines(storage: Storage, name: str, count: int) -> list[bytes]:
    """The last whole lines of a file, without their ends; none where there is no file."""
    if not storage.is_local:
        return [line for line in (storage.read_bytes(name) or b"").rpartition(b"\n")[0].split(b"\n")[-count:] if line]
    try:
        with open(storage.path(name), "rb") as file:
            end = start = file.seek(0, os.SEEK_END)
            data = b""
            while start and data.count(b"\n") <= count:
                start = max(0, start - max(_TAIL_BYTES, len(data)))
                file.seek(start)
                data = file.read(end - start)
    except FileNotFoundError:
        return []
    whole = data.rpartition(b"\n")[0].split(b"\n")  # a run that was killed, or still goes on, may have written a part
    return [line for line in whole[-count:] if line]


def read_lines(storage: Storage, name: str) -> Iterator[dict[str, Any]]:
    for line in (storage.read_bytes(name) or b"").splitlines():
        with contextlib.suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict):
                yield facts
