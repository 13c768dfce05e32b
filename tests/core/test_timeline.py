"""The records of a run's timeline, and the recorded package versions."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from drivetrain._storage.layout import TIMELINE_FILE
from drivetrain._storage.timeline import (
    AttemptEnded,
    AttemptFailed,
    AttemptResumed,
    AttemptStarted,
    CheckpointCommitted,
    DriverStarted,
    NoteAdded,
    RunEnded,
    TimelineRecord,
    VersionsFound,
    append_record,
    read_timeline,
)
from drivetrain.runs import History
from tests.support import local_storage

RECORDS: list[TimelineRecord] = [
    DriverStarted(time=1.0, environment={"host": "here"}),
    VersionsFound(time=2.0, packages={"torch": "2.9"}),
    AttemptStarted(time=3.0, attempt=0, workers=[{"rank": 0}]),
    AttemptResumed(time=4.0, iteration=7),
    CheckpointCommitted(time=5.0, name="checkpoint_000008", iteration=8),
    AttemptFailed(time=6.0, failure={"kind": "hang"}, retrying=False, traceback="", log="last words"),
    AttemptEnded(time=7.0, attempt=0),
    RunEnded(time=8.0, outcome="failed", error="it hangs"),
    NoteAdded(time=9.0, source="drivetrain prove", text="different"),
]

# Written by a version that had no classes for the records; the format is the same.
OLDER_FILE = """\
{"time": 1.0, "event": "start", "environment": {"host": "here"}}
{"time": 2.0, "event": "packages", "packages": {"torch": "2.9"}}
{"time": 3.0, "event": "attempt", "attempt": 0, "workers": [{"rank": 0}]}
{"time": 4.0, "event": "resume", "iteration": 7}
{"time": 5.0, "event": "checkpoint", "name": "checkpoint_000008", "iteration": 8}
{"time": 6.0, "event": "failure", "failure": {"kind": "hang"}, "retrying": false, "traceback": "", "log": "last words"}
{"time": 7.0, "event": "attempt end", "attempt": 0}
{"time": 8.0, "event": "end", "outcome": "failed", "error": "it hangs"}
{"time": 9.0, "event": "note", "source": "drivetrain prove", "text": "different"}
"""


def test_every_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    for record in RECORDS:
        append_record(tmp_path, record)
    assert list(read_timeline(local_storage(tmp_path))) == RECORDS
    assert {type(record) for record in RECORDS} == set(TimelineRecord.__subclasses__())


def test_file_of_an_earlier_version_is_read_and_written_the_same(tmp_path: Path) -> None:
    for record in RECORDS:
        append_record(tmp_path, record)
    written = (tmp_path / TIMELINE_FILE).read_text()
    assert [json.loads(line) for line in written.splitlines()] == [json.loads(line) for line in OLDER_FILE.splitlines()]
    (tmp_path / TIMELINE_FILE).write_text(OLDER_FILE)
    assert list(read_timeline(local_storage(tmp_path))) == RECORDS


@pytest.mark.parametrize(
    "unusable",
    [
        {"time": 3.5, "event": "of a later version"},
        {"time": 3.5, "event": ["start"]},
        {"time": 3.5},
        {"time": 3.5, "event": "resume"},
        {"time": "soon", "event": "resume", "iteration": 3},
        [1, 2],
        "text",
    ],
)
def test_unknown_and_incomplete_records_are_skipped(unusable: Any, tmp_path: Path) -> None:
    older = OLDER_FILE.splitlines(keepends=True)
    (tmp_path / TIMELINE_FILE).write_text("".join([*older[:3], json.dumps(unusable) + "\n", *older[3:]]) + '{"time": 9')
    assert list(read_timeline(local_storage(tmp_path))) == RECORDS


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    line = {"time": 4.0, "event": "resume", "iteration": 7, "reason": "growth"}
    (tmp_path / TIMELINE_FILE).write_text(json.dumps(line) + "\n")
    assert list(read_timeline(local_storage(tmp_path))) == [AttemptResumed(time=4.0, iteration=7)]


def test_history_summarizes_the_records() -> None:
    history = History()
    for record in RECORDS:
        history.add(record)
    (attempt,) = history.attempts
    assert (attempt.start, attempt.began, attempt.ended, attempt.resumed_from) == (1, 3.0, 7.0, 7)
    assert attempt.failure == {"kind": "hang", "retrying": False, "traceback": "", "log": "last words"}
    assert history.environment == {"host": "here", "packages": {"torch": "2.9"}}
    assert (history.outcome, history.error_line, history.ended, history.last_time) == ("failed", "it hangs", 8.0, 8.0)
    assert list(history.committed) == ["checkpoint_000008"]
    assert history.notes == [{"time": 9.0, "source": "drivetrain prove", "text": "different"}]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_history_that_begins_with_any_record_is_read(record: TimelineRecord) -> None:
    """The first records of a file may have been lost."""
    history = History()
    history.add(record)
    assert history.last_time == record.time
    assert len(fields(record)) > 1


def write_metadata(directory: Path, name: str, version: str, *requirements: str) -> None:
    folder = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (folder / "METADATA").write_text("\n".join([*lines, "", "Requires-Dist: described"]))


def test_recorded_versions_include_the_requirements_of_plugins(tmp_path: Path) -> None:
    write_metadata(
        tmp_path, "acme-plugin", "3", "drivetrain>=0.1", "Acme_Net>=1", 'acme-extra; extra == "all"', "absent"
    )
    write_metadata(tmp_path, "drivetrain-like", "3", "drivetrainer", "unrelated")
    for name in ("acme-net", "acme-net-gpu", "acme-extra", "unrelated", "described"):
        write_metadata(tmp_path, name, "1.5")
    write_metadata(tmp_path, "damaged", "1")
    (tmp_path / "damaged-1.dist-info" / "METADATA").write_bytes(b"Name: damaged\nVersion: 1\nAuthor: Jos\xe9\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from drivetrain.loggers.versions import installed_versions\n"
        "import json; print(json.dumps(installed_versions()))"
    )
    found = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    assert {name for name in found if name.startswith("acme")} == {"acme-net", "acme-net-gpu", "acme-extra"}
    assert found["acme-net"] == "1.5"
    assert found["fsspec"], "the core requires it"
    assert not {"acme-plugin", "drivetrain", "unrelated", "described", "absent", "pytest"} & found.keys()
