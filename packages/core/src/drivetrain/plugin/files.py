"""The names of the files of a run directory, for programs that read it."""

from drivetrain._base.lazy import publish
from drivetrain._storage.checkpoint import parse_listing
from drivetrain._storage.filesystem import link_error
from drivetrain._storage.layout import (
    ERROR_FILE,
    LISTING_FILE,
    LOCK_FILE,
    MANIFEST,
    METADATA_FILE,
    PENDING,
    PIN_FILE,
    RUN_FILE,
    TIMELINE_FILE,
    USAGE_FILE,
    checkpoint_name,
    result_file,
)
from drivetrain._worker.output import log_name

__all__ = [
    "ERROR_FILE",
    "LISTING_FILE",
    "LOCK_FILE",
    "MANIFEST",
    "METADATA_FILE",
    "PENDING",
    "PIN_FILE",
    "RUN_FILE",
    "TIMELINE_FILE",
    "USAGE_FILE",
    "checkpoint_name",
    "link_error",
    "log_name",
    "parse_listing",
    "result_file",
]

publish(__name__)
