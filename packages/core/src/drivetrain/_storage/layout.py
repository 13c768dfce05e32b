"""The names of the files and directories in a run directory."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import quote

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
    "RUN_FILE",
    "STAGED_RUNS",
    "TIMELINE_FILE",
    "TRAINER_FILE",
    "USAGE_FILE",
    "announcement",
    "checkpoint_name",
    "file_mode",
    "is_reserved",
    "result_file",
    "staging_key",
]

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
"""Where the names of directories are left that no pattern tells, while they are yet to be committed or deleted."""

# In a checkpoint's directory.
LISTING_FILE = ".checkpoint.json"
METADATA_FILE = ".metadata.json"
PIN_FILE = ".pinned"

STAGED_RUNS = "runs"
"""The kind of the local directories that mirror runs which are stored elsewhere."""

_NAMES = frozenset(
    {
        *(RUN_FILE, TRAINER_FILE, *ERROR_FILES, TIMELINE_FILE, USAGE_FILE, PROGRESS_FILE),
        *(ARTIFACTS, LOGS, MANIFEST),
    }
)
_PUBLIC = frozenset({MANIFEST, LISTING_FILE, METADATA_FILE, PIN_FILE, LOCK_FILE})
_NAME_PATTERN = re.compile(r"\..*|result(_rank_\d+)?\.json|events\.out\.tfevents\..*")

CHECKPOINT_NAME = re.compile(r"checkpoint_(\d{6,})")


def checkpoint_name(index: int) -> str:
    """The directory of the checkpoint that belongs to a report, by the report's index in the run."""
    return f"checkpoint_{index:06d}"


def announcement(name: str) -> str:
    """The file that tells a sweep of a checkpoint's directory that no pattern tells."""
    return f"{PENDING}/{quote(name, safe='')}"


def is_reserved(name: str) -> bool:
    """Whether a name in a run directory belongs to drivetrain, so that no checkpoint may have it."""
    return name in _NAMES or _NAME_PATTERN.fullmatch(name) is not None


def file_mode(name: str) -> int:
    """Returns the permissions of a new file of a run directory, before the umask is applied.

    Files that may contain configuration, output or tracebacks are never readable for users outside the file's group.
    """
    return 0o666 if posixpath.basename(name) in _PUBLIC or name.startswith(f"{PENDING}/") else 0o660


def result_file(rank: int) -> str:
    """The name of the file with a rank's reports."""
    return "result.json" if rank == 0 else f"result_rank_{rank}.json"


def staging_key(run_id: str, start: int | None) -> str:
    """What tells the local directory of a run that is stored elsewhere."""
    return f"{run_id}-{start}"
