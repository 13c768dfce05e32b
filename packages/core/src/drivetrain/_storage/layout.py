"""The names of the files and directories in a run directory, and the version of its format.

Names that are read from a run directory may have been written by someone else. Every such name passes
:func:`require_checkpoint_name` or :func:`require_relative` where it is parsed, so nothing outside the run directory is
ever written, moved or deleted. ``Storage.path`` repeats the check for every path that it builds.
"""

from __future__ import annotations

import posixpath
import re
import secrets
from collections.abc import Collection
from typing import Any
from urllib.parse import quote, unquote

from drivetrain.errors import StorageError

__all__ = [
    "ARTIFACTS",
    "CHECKPOINT_NAME",
    "ERROR_FILE",
    "ERROR_FILES",
    "ERROR_TEXT_FILE",
    "LISTING_FILE",
    "LOCK_FILE",
    "LOGS",
    "MANIFEST",
    "METADATA_FILE",
    "PENDING",
    "PIN_FILE",
    "PROGRESS_FILE",
    "RESULT_FILE",
    "RUN_FILE",
    "STAGED_RUNS",
    "TIMELINE_FILE",
    "TRAINER_FILE",
    "USAGE_FILE",
    "VERSION",
    "announced_name",
    "announcement",
    "check_version",
    "checkpoint_name",
    "draft_name",
    "file_mode",
    "is_draft",
    "is_reserved",
    "require_checkpoint_name",
    "require_relative",
    "result_file",
    "staging_key",
]

VERSION = 1
"""The version of the format of a run directory. Increment it when older releases can no longer read the files."""

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

MANIFEST = "manifest.json"
PENDING = ".pending"
"""The directory with the names of custom-named checkpoint directories that are yet to be committed or deleted."""

# In a checkpoint's directory.
LISTING_FILE = ".checkpoint.json"
METADATA_FILE = ".metadata.json"
PIN_FILE = ".pinned"

STAGED_RUNS = "runs"
"""The kind of the local directories that mirror runs in remote storage."""

_NAMES = frozenset(
    {
        *(RUN_FILE, TRAINER_FILE, *ERROR_FILES, TIMELINE_FILE, USAGE_FILE, PROGRESS_FILE),
        *(ARTIFACTS, LOGS, MANIFEST),
    }
)
_PUBLIC = frozenset({MANIFEST, LISTING_FILE, METADATA_FILE, PIN_FILE, LOCK_FILE})
_NAME_PATTERN = re.compile(r"\..*|result(_rank_\d+)?\.json|events\.out\.tfevents\..*")

CHECKPOINT_NAME = re.compile(r"checkpoint_(\d{6,})")

RESULT_FILE = re.compile(r"result(?:_rank_(\d+))?\.json")
"""The files with the reports of each rank."""

_DRAFT = re.compile(r"\.([^.].*)\.[0-9a-f]{8}")


def checkpoint_name(index: int) -> str:
    """Return the default name of a checkpoint's directory.

    Args:
        index: the index in the run of the report that the checkpoint belongs to.
    """
    return f"checkpoint_{index:06d}"


def announcement(name: str) -> str:
    """Return the file that announces a custom-named checkpoint directory, so that a sweep can find it."""
    return f"{PENDING}/{quote(name, safe='')}"


def announced_name(file: str, where: str) -> str:
    """Return the checkpoint directory that a file in :data:`PENDING` announces.

    Raises:
        StorageError: the name is not valid for a checkpoint directory.
    """
    return require_checkpoint_name(unquote(file), where)


def require_relative(path: object, where: str) -> str:
    """Return a path that was read from a run directory, if it stays below the directory that it is relative to.

    Args:
        path: the path, with forward slashes.
        where: the file or directory that contains it, for error messages.

    Raises:
        StorageError: the path is absolute, or contains ``.`` or ``..``.
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
    """Return the name of a checkpoint's directory that was read from a run directory.

    It is one path component, or several if the train function made the directory (``checkpoint_upload_mode="none"``).

    Args:
        name: the name.
        where: the file or directory that contains it, for error messages.

    Raises:
        StorageError: the name leaves the run directory, or is reserved by drivetrain.
    """
    checked = require_relative(name, where)
    if checked.startswith(".") or "" in checked.split("/") or is_reserved(checked):
        raise StorageError(f"[DT-413] {where}: expected the name of a checkpoint's directory, got {name!r}")
    return checked


def check_version(version: Any, where: str, kind: type[StorageError] = StorageError) -> None:
    """Reject a file in a newer format than this release can read.

    Args:
        version: the version in the file.
        where: the file.
        kind: the class of the error.

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
    """Return a new name for the draft of a file, which is renamed once it is complete."""
    return f".{name}.{secrets.token_hex(4)}"


def is_draft(name: str, files: Collection[str] | None = None) -> bool:
    """Return True for the draft of a file, which a killed process may have left.

    Args:
        name: the name of the possible draft.
        files: accept only drafts of these files; None for all files.
    """
    match = _DRAFT.fullmatch(name)
    return match is not None and (files is None or match[1] in files)


def is_reserved(name: str) -> bool:
    """Return True if a name in a run directory is reserved by drivetrain, so that no checkpoint may have it."""
    return name in _NAMES or _NAME_PATTERN.fullmatch(name) is not None


def file_mode(name: str) -> int:
    """Return the permissions of a new file of a run directory, before the umask is applied.

    Files that may contain configuration, output or tracebacks are never readable for users outside the file's group.
    """
    return 0o666 if posixpath.basename(name) in _PUBLIC or name.startswith(f"{PENDING}/") else 0o660


def result_file(rank: int) -> str:
    """Return the name of the file with a rank's reports."""
    return "result.json" if rank == 0 else f"result_rank_{rank}.json"


def staging_key(run_id: str, start: int | None) -> str:
    """Return the key of the local directory that mirrors a run in remote storage."""
    return f"{run_id}-{start}"
