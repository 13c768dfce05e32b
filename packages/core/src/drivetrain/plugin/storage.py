"""Run directories: where they are, what locks them, and the checkpoints in them."""

from drivetrain._base.lazy import publish
from drivetrain._storage.checkpoint import checkpoint_in
from drivetrain._storage.directory import Storage, open_storage, runs_location, with_short_deadline
from drivetrain._storage.filesystem import RemoteFilesystem
from drivetrain._storage.lock import RunLock, find_holder
from drivetrain._storage.manifest import CheckpointManager, delete_checkpoints, read_manifest
from drivetrain._storage.remote import FsspecFilesystem, locate
from drivetrain._storage.retention import rank_checkpoints
from drivetrain._storage.upload import put_directory

__all__ = [
    "CheckpointManager",
    "FsspecFilesystem",
    "RemoteFilesystem",
    "RunLock",
    "Storage",
    "checkpoint_in",
    "delete_checkpoints",
    "find_holder",
    "locate",
    "open_storage",
    "put_directory",
    "rank_checkpoints",
    "read_manifest",
    "runs_location",
    "with_short_deadline",
]

publish(__name__)
