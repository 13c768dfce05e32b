"""The names of the files and directories in a run directory, what is true of each file, and the version of the format.

Names that are read from a run directory may have been written by someone else. Every such name is checked by
:func:`require_checkpoint_name` or :func:`require_relative` when it is parsed, so nothing outside of the run directory
is ever written, moved or deleted. ``Storage.path`` repeats the check for every path that it builds.
"""

from __future__ import annotations

import posixpath
import re
import secrets
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from drivetrain.errors import StorageError

__all__ = [
    "ARTIFACTS",
    "CHECKPOINT_NAME_PATTERN",
    "ERROR_FILE",
    "ERROR_FILES",
    "ERROR_TEXT_FILE",
    "LISTING_FILE",
    "LOCK_FILE",
    "LOGS",
    "MANIFEST",
    "METADATA_FILE",
    "METRICS",
    "PENDING",
    "PIN_FILE",
    "PROGRESS_FILE",
    "RESULT_FILE_PATTERN",
    "RUN_FILE",
    "SEGMENTS",
    "STAGED_RUNS",
    "TIMELINE_FILE",
    "TRAINER_FILE",
    "USAGE_FILE",
    "VERSION",
    "RunFile",
    "announced_name",
    "announcement_name",
    "check_version",
    "checkpoint_name",
    "draft_name",
    "draft_target",
    "grows",
    "is_reserved",
    "require_checkpoint_name",
    "require_relative",
    "result_file",
    "run_file",
    "staging_key",
]

VERSION = 1
"""The version of the format of run directories. Increment it if older releases cannot read the new format."""

RUN_FILE = "run.json"
TRAINER_FILE = "trainer.pkl"
ERROR_FILE = "error.json"
ERROR_TEXT_FILE = "error.txt"
ERROR_FILES = (ERROR_FILE, ERROR_TEXT_FILE)
LOCK_FILE = ".lock"
TIMELINE_FILE = "timeline.jsonl"
USAGE_FILE = "usage.jsonl"
PROGRESS_FILE = "progress.csv"
ARTIFACTS = "artifacts"
LOGS = "logs"

METRICS = "metrics"
"""The directory with the Parquet files of reports: see :mod:`drivetrain._storage.parquetparts`."""


MANIFEST = "manifest.json"
PENDING = ".pending"
"""The directory that records the names of custom-named checkpoint directories until they are committed or deleted."""

SEGMENTS = ".segments"
"""The directory with the segments of files that grow, on remote storage: see :mod:`drivetrain._storage.segments`."""

# The next three files are in each checkpoint's directory.
LISTING_FILE = ".checkpoint.json"
METADATA_FILE = ".metadata.json"
PIN_FILE = ".pinned"

STAGED_RUNS = "runs"
"""The ``kind`` argument of ``share_directory`` for the local directories that are uploaded to remote runs."""

CHECKPOINT_NAME_PATTERN = re.compile(r"checkpoint_(\d{6,})")

RESULT_FILE_PATTERN = re.compile(r"result(?:_rank_(\d+))?\.json")
"""Matches the names of the files with the reports of a rank."""

_MEBIBYTE = 1 << 20
_OWNER, _GROUP, _ALL = 0o600, 0o660, 0o666


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file that drivetrain writes to a run directory or to a checkpoint's directory.

    Attributes:
        name: the name of the file.
        limit: the maximum size in bytes of a file that is read into memory as a whole.
        mode: the permissions of a new file, before the umask is applied. Files that may contain configuration, output
            or tracebacks are never readable by users outside of the file's group.
        grows: True if lines are added to the file during the run. See :func:`grows`.
        replaced: True if the file is replaced atomically, so that a killed driver may leave a draft of it.
    """

    name: str
    limit: int = 4096 * _MEBIBYTE
    mode: int = _GROUP
    grows: bool = False
    replaced: bool = False


_FILES = {
    file.name: file
    for file in (
        RunFile(RUN_FILE, 16 * _MEBIBYTE, replaced=True),
        RunFile(TRAINER_FILE, mode=_OWNER, replaced=True),  # the arguments of the trainer may contain secrets
        # The maximum number of values is usually reached first: 37,000 checkpoints with 100 metrics.
        RunFile(MANIFEST, 256 * _MEBIBYTE, _ALL, replaced=True),
        RunFile(ERROR_FILE, 64 * _MEBIBYTE, replaced=True),
        RunFile(ERROR_TEXT_FILE, 64 * _MEBIBYTE, replaced=True),
        # The maximum number of values is usually reached first: 400,000 records of workers.
        RunFile(TIMELINE_FILE, 128 * _MEBIBYTE, grows=True),
        RunFile(USAGE_FILE, 64 * _MEBIBYTE, _ALL, grows=True),
        RunFile(PROGRESS_FILE, mode=_ALL, grows=True),
        RunFile("result.json", mode=_ALL, grows=True),
        RunFile(LOCK_FILE, _MEBIBYTE, 0o664),
        RunFile(LISTING_FILE, 64 * _MEBIBYTE, _ALL),  # 800,000 files
        RunFile(METADATA_FILE, 64 * _MEBIBYTE, _ALL),
        RunFile(PIN_FILE, mode=_ALL),
    )
}
_OTHER_JSON = RunFile("*.json", 1024 * _MEBIBYTE)  # such as tuner.json of a search
_OTHER = RunFile("*")
_PARQUET = RunFile("*.parquet", 256 * _MEBIBYTE)
_RESERVED = re.compile(rf"\..*|{RESULT_FILE_PATTERN.pattern}|events\.out\.tfevents\..*")

_DRAFT = re.compile(r"\.([^.].*)\.[0-9a-f]{8}")


def checkpoint_name(number: int) -> str:
    """Return the default name of a checkpoint's directory.

    Args:
        number: the number, in the run, of the report that the checkpoint belongs to.
    """
    return f"checkpoint_{number:06d}"


def announcement_name(name: str) -> str:
    """Return the name of the file that announces a custom-named checkpoint directory, so that a sweep can find it."""
    return f"{PENDING}/{quote(name, safe='')}"


def announced_name(file: str, where: str) -> str:
    """Return the name of the checkpoint directory that a file in :data:`PENDING` announces.

    Raises:
        StorageError: the name is not valid for a checkpoint directory.
    """
    return require_checkpoint_name(unquote(file), where)


def require_relative(path: object, where: str) -> str:
    """Return a path that was read from a run directory. Raise an error if the path leads out of its base directory.

    Args:
        path: the path, with forward slashes.
        where: the file or directory from which the path was read, for error messages.

    Raises:
        StorageError: the path is empty or absolute, or has ``.`` or ``..`` as a component.
    """
    if isinstance(path, str) and path and not path.startswith("/") and "\0" not in path:
        enclosed = f"/{path}/"
        if "/./" not in enclosed and "/../" not in enclosed:
            return path
    raise StorageError(
        f"[DT-413] {where}: expected a path below this directory, got {path!r}. Do not use this directory: it is "
        "damaged, or someone made it to change other files"
    )


def require_checkpoint_name(name: object, where: str) -> str:
    """Return a name that was read from a run directory. Raise an error if no checkpoint's directory can have that name.

    The name is one path component, or several if the train function created the directory itself
    (``checkpoint_upload_mode="none"``).

    Args:
        name: the name.
        where: the file or directory from which the name was read, for error messages.

    Raises:
        StorageError: the name leads out of the run directory, or is reserved by drivetrain.
    """
    checked = require_relative(name, where)
    if checked.startswith(".") or "" in checked.split("/") or is_reserved(checked):
        raise StorageError(f"[DT-413] {where}: expected the name of a checkpoint's directory, got {name!r}")
    return checked


def check_version(version: Any, where: str, kind: type[StorageError] = StorageError) -> None:
    """Reject a file whose format is newer than this release can read.

    Args:
        version: the format version in the file.
        where: the file, for the error message.
        kind: the class of the error to raise.

    Raises:
        StorageError: the version is newer than :data:`VERSION`, or is not an integer.
    """
    if not isinstance(version, int):
        raise kind(f"[DT-413] {where}: expected a format version up to {VERSION}, got {version!r}")
    if version > VERSION:
        raise kind(
            f"[DT-414] {where} was written by a newer drivetrain (expected a format version up to {VERSION}, got "
            f"{version}). Upgrade drivetrain"
        )


def draft_name(name: str) -> str:
    """Return a new name for the draft of a file. The draft is renamed to the file once it is complete."""
    return f".{name}.{secrets.token_hex(4)}"


def draft_target(name: str) -> str:
    """Return the name of the file that a draft would have replaced; empty if a file is no draft.

    A killed process may have left drafts.
    """
    match = _DRAFT.fullmatch(name)
    return match[1] if match is not None else ""


def is_reserved(name: str) -> bool:
    """Return True if drivetrain reserves a name in run directories, so that no checkpoint may have that name."""
    return name in _FILES or name in (ARTIFACTS, LOGS, METRICS) or _RESERVED.fullmatch(name) is not None


def run_file(name: str) -> RunFile:
    """Return what is true of a file of a run directory or of a checkpoint's directory.

    Args:
        name: the name of the file, or its path.
    """
    base = posixpath.basename(name)
    if RESULT_FILE_PATTERN.fullmatch(base):
        base = result_file(0)
    if base.endswith(".parquet"):
        return _PARQUET
    return _FILES.get(base, _OTHER_JSON if base.endswith(".json") else _OTHER)


def grows(name: str) -> bool:
    """Return True if lines are added to a file of a run directory during the run.

    On remote storage, such a file may consist of segments. A driver that resumes the run first downloads what earlier
    drivers have written.

    Args:
        name: the path of the file, relative to the run directory.
    """
    directory, _, base = name.rpartition("/")
    return directory == LOGS or (not directory and run_file(base).grows)


def result_file(rank: int) -> str:
    """Return the name of the file with a rank's reports."""
    return "result.json" if rank == 0 else f"result_rank_{rank}.json"


def staging_key(run_id: str, start: int | None) -> str:
    """Return the ``key`` argument of ``share_directory`` for the local directory that is uploaded to a remote run."""
    return f"{run_id}-{start}"
