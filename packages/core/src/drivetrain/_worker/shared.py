"""Directories in which all ranks save one checkpoint together, for frameworks whose ranks save collectively.

On local storage, this is the checkpoint's directory in the run directory, so nothing is copied. On other storage, the
ranks of a node share a local directory. Each of them records when it has reported the checkpoint, and the last one
uploads the files, which are complete by then.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
from typing import Protocol

from drivetrain._base.crashpoints import reach
from drivetrain._hooks.context import TrainContext
from drivetrain._storage.checkpoint import Checkpoint, checkpoint_in
from drivetrain._storage.filesystem import walk_local
from drivetrain._storage.layout import checkpoint_name
from drivetrain._storage.node import share_directory
from drivetrain.errors import CheckpointError

__all__ = ["SharedDirectory", "open_shared_directory"]


class SharedDirectory(Protocol):
    """A directory in which all ranks save one checkpoint.

    Attributes:
        name: the name of the checkpoint's directory in the run directory.
        checkpoint: the directory to which this rank writes.
        adds_positions: True if this rank adds the positions of datasets to the metadata. The others of the directory do
            not, because all positions are the same, and two ranks cannot update one file at the same time.
    """

    name: str
    checkpoint: Checkpoint
    adds_positions: bool

    def take_files(self) -> str | None:
        """Record that this rank has written its files. Return the directory to upload; None if there is none."""
        ...

    def delete_files(self) -> None:
        """Delete the files that :meth:`take_files` returned, because they are uploaded."""
        ...

    def close(self) -> None:
        """Release the directory, unless other ranks have yet to use it."""
        ...


def open_shared_directory(context: TrainContext, driver_count: int | None, number: int) -> SharedDirectory:
    """Create the directory for a checkpoint, or open it if another rank has created it.

    Args:
        context: the context of the train function.
        driver_count: the number of drivers that have worked on the run.
        number: the number of the report to which the checkpoint belongs.

    Raises:
        StorageError: the directory cannot be created.
    """
    if context.storage.is_local:
        return _InRunDirectory(context, checkpoint_name(number))
    _close_unneeded()
    # Several nodes of a test cluster may be on one machine, so the node is part of the key.
    key = f"{context.run_id}-{driver_count}-{context.attempt}-{number}-{context.worker.node_rank}"
    return _OnNode(context, checkpoint_name(number), key)


class _InRunDirectory:
    """The checkpoint's directory in a local run directory. Its files are stored already."""

    def __init__(self, context: TrainContext, name: str) -> None:
        self.name = name
        self.checkpoint = checkpoint_in(context.storage, name)
        self.adds_positions = context.worker.rank == 0
        context.storage.call(f"create {name}", lambda: os.makedirs(self.checkpoint.path, exist_ok=True))
        reach("before upload")

    def take_files(self) -> None:
        reach("after upload")  # the commit, which follows the reports of all ranks, requires files

    def delete_files(self) -> None:
        pass

    def close(self) -> None:
        pass


class _OnNode:
    """A temporary directory that the ranks of a node share: their files, and a mark for each rank that has reported."""

    def __init__(self, context: TrainContext, name: str, key: str) -> None:
        self.name = name
        self.adds_positions = context.worker.local_rank == 0
        self._rank, self._ranks_on_node = context.worker.rank, context.local_world_size
        self._stack = contextlib.ExitStack()
        self._directory = self._stack.enter_context(share_directory("uploads", key))
        self._files, self._marks = (os.path.join(self._directory, part) for part in ("files", "reported"))
        self._uploader = os.path.join(self._directory, "uploader")
        self._uploads = False
        for directory in (self._files, self._marks):
            os.makedirs(directory, exist_ok=True)
        self.checkpoint = Checkpoint.from_directory(self._files)

    def take_files(self) -> str | None:
        _create(os.path.join(self._marks, str(self._rank)))
        if not self._uploads and len(os.listdir(self._marks)) == self._ranks_on_node:
            _require_files(self._files)  # not earlier: some ranks may write no file
            self._uploads = _create(self._uploader)  # two ranks can both see the marks of all ranks
        return self._files if self._uploads else None

    def delete_files(self) -> None:
        shutil.rmtree(self._files, ignore_errors=True)

    def close(self) -> None:
        # The last process to release the directory deletes it, and a rank that has not opened it yet would not see the
        # files of this rank. So this rank keeps it until all ranks of the node have reported.
        if self._uploads or not os.path.exists(os.path.join(self._marks, str(self._rank))) or self.is_complete:
            self._stack.close()
        else:
            _open.append(self)
            atexit.unregister(_close_unneeded)
            atexit.register(_close_unneeded)

    @property
    def is_complete(self) -> bool:
        """True if all ranks of the node have reported the checkpoint."""
        return os.path.exists(self._uploader)


_open: list[_OnNode] = []
"""The directories that this process has not released yet. They are released when the process exits, at the latest."""


def _close_unneeded() -> None:
    for directory in [each for each in _open if each.is_complete]:
        _open.remove(directory)
        directory.close()


def _create(file: str) -> bool:
    """Create an empty file. Return False if it exists already."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def _require_files(directory: str) -> None:
    if next(iter(walk_local(directory)), None) is None:
        raise CheckpointError(
            f"[DT-408] report(): expected files in the shared checkpoint's directory, got none from any rank in "
            f"{directory}. Save the checkpoint to its path before calling report()"
        )
