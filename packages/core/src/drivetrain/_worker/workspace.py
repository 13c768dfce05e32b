"""Creates the directory for a worker's artifacts (all files except checkpoints), and uploads the artifacts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from drivetrain._hooks.context import TrainContext
from drivetrain._storage.filesystem import walk_local
from drivetrain._storage.layout import ARTIFACTS, STAGED_RUNS, staging_key
from drivetrain._storage.mirror import Mirror
from drivetrain._storage.node import share_directory
from drivetrain._wire.task import SessionOptions

__all__ = ["open_workspace"]


@contextlib.contextmanager
def open_workspace(context: TrainContext, options: SessionOptions) -> Iterator[tuple[TrainContext, Callable[[], None]]]:
    """Create the directory for artifacts on this node, and upload the artifacts if the options request that.

    Args:
        context: the context of the train function.
        options: the parts of the run's configuration that the worker uses.

    Yields:
        The context with the path of the directory, and a function to call after each report with a checkpoint.
    """
    with contextlib.ExitStack() as stack:
        if context.storage.is_local:
            directory = context.storage.path(ARTIFACTS)
            on_checkpoint: Callable[[], None] = lambda: None  # noqa: E731 - the same name as below
        else:
            staged, on_checkpoint = stack.enter_context(_staged(context, options))
            directory = os.path.join(staged, ARTIFACTS)
        os.makedirs(directory, exist_ok=True)
        if options.chdir:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(directory)
        elif options.sync.sync_artifacts and context.get_local_rank() == 0:
            stack.callback(_report_new_files, os.getcwd(), _files_in(os.getcwd()))
        yield replace(context, trial_dir=directory), on_checkpoint


@contextlib.contextmanager
def _staged(context: TrainContext, options: SessionOptions) -> Iterator[tuple[str, Callable[[], None]]]:
    """Share a directory among a node's ranks. Local rank 0 uploads its files, and the last rank to leave the rest."""
    sync = options.sync

    def mirror(staged: str) -> Mirror:
        return Mirror(
            os.path.join(staged, ARTIFACTS),
            context.storage,
            ARTIFACTS,
            period_s=sync.sync_period,
            warn=_warn,
            state=os.path.join(staged, "uploaded.json"),
        )

    def finish(staged: str) -> None:
        if sync.sync_artifacts:
            mirror(staged).try_push()
        elif count := sum(1 for _ in walk_local(os.path.join(staged, ARTIFACTS))):
            _warn(f"{count} files in get_trial_dir() are not kept. Set SyncConfig(sync_artifacts=True) to upload them")

    key = f"{staging_key(context.run_id, options.driver_count)}-{context.attempt}"
    with share_directory(STAGED_RUNS, key, before_deletion=finish) as staged:
        if not sync.sync_artifacts or context.get_local_rank() != 0:
            yield staged, lambda: None
            return
        with mirror(staged).running() as running:
            yield staged, running.wake if sync.sync_artifacts_on_checkpoint else lambda: None


def _files_in(directory: str) -> dict[str, int]:
    """Return the files of a directory with the times of their last changes."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.is_file()}
    return {}


def _report_new_files(directory: str, before: dict[str, int]) -> None:
    """Warn of files in the working directory, which are no artifacts, although the user has enabled artifacts."""
    new = sorted(name for name, changed in _files_in(directory).items() if before.get(name) != changed)
    if new:
        others = f" and {len(new) - 1} other files" if len(new) > 1 else ""
        _warn(
            f"SyncConfig(sync_artifacts=True): {new[0]!r}{others} in the working directory {directory} "
            f"{'are' if others else 'is'} not stored with the run. Set RunConfig(chdir_to_trial_dir=True), or write "
            "files to get_context().get_trial_dir()"
        )


def _warn(line: str) -> None:
    print(f"drivetrain: {line}", file=sys.stderr)
