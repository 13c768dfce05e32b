"""Where a worker's train function leaves files beside its checkpoints, and how they reach the storage."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from drivetrain.context import TrainContext
from drivetrain.session import SessionOptions
from drivetrain.storage import Storage
from drivetrain.storage.filesystem import walk_local
from drivetrain.storage.mirror import Mirror
from drivetrain.storage.node import share_directory

__all__ = ["ARTIFACTS", "STAGED_RUNS", "open_workspace", "staging_key"]

ARTIFACTS = "artifacts"
STAGED_RUNS = "runs"


def staging_key(run_id: str, start: int | None) -> str:
    """What tells the local directory of a run that is stored elsewhere."""
    return f"{run_id}-{start}"


@contextlib.contextmanager
def open_workspace(
    storage: Storage, context: TrainContext, options: SessionOptions
) -> Iterator[tuple[TrainContext, Callable[[], None]]]:
    """Makes the directory for artifacts on this node, and uploads from it if that is asked for.

    Args:
        storage: the run directory.
        context: the worker's facts.
        options: see there.

    Yields:
        The facts with the directory in them, and what to call when a checkpoint was reported.
    """
    with contextlib.ExitStack() as stack:
        if storage.is_local:
            directory = storage.path(ARTIFACTS)
            on_checkpoint: Callable[[], None] = lambda: None  # noqa: E731 - the same name as below
        else:
            key = staging_key(context.get_trial_id(), options.start)
            staged = stack.enter_context(share_directory(STAGED_RUNS, key))
            directory = os.path.join(staged, ARTIFACTS)
            on_checkpoint = stack.enter_context(_synced(directory, storage, context, options))
        os.makedirs(directory, exist_ok=True)
        if options.chdir:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(directory)
        yield replace(context, trial_dir=directory), on_checkpoint


@contextlib.contextmanager
def _synced(
    directory: str, storage: Storage, context: TrainContext, options: SessionOptions
) -> Iterator[Callable[[], None]]:
    os.makedirs(directory, exist_ok=True)
    sync = options.sync
    if not sync.sync_artifacts:
        try:
            yield lambda: None
        finally:
            if context.get_local_rank() == 0 and (left := sum(1 for _ in walk_local(directory))):
                _warn(f"{left} files in get_trial_dir() are not kept: SyncConfig(sync_artifacts=True) uploads them")
        return
    if context.get_local_rank() != 0:  # the node's ranks share the directory
        yield lambda: None
        return
    mirror = Mirror(directory, storage, ARTIFACTS, period_s=sync.sync_period, warn=_warn)
    with mirror.running():
        yield mirror.wake if sync.sync_artifacts_on_checkpoint else lambda: None


def _warn(line: str) -> None:
    print(f"drivetrain: {line}", file=sys.stderr)
