"""``drivetrain runs gc``: deletes uncommitted and old checkpoints of runs that are not in use."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from drivetrain import CheckpointConfig, ConfigurationError, RunInUseError, StorageError
from drivetrain.plugin.callbacks import Console
from drivetrain.plugin.reading import damage_of
from drivetrain.plugin.storage import CheckpointManager, RunLock, Storage, find_holder
from drivetrain.runs import readers_in
from drivetrain_console._commands.output import OK, Commands, MissingError, add_command, emit, find_storage
from drivetrain_console._views.terminal import bytes_text, table

__all__ = ["add_gc"]


@dataclass
class _Finding:
    """The deletable checkpoints of a run, or the reason for skipping the run."""

    run: str
    skipped: str = ""
    deletions: list[dict[str, Any]] = field(default_factory=list)


def add_gc(commands: Commands) -> None:
    """Add ``runs gc``."""
    parser = add_command(
        commands,
        "gc",
        _gc,
        "delete checkpoints that killed drivers left behind, and optionally old checkpoints; skips runs in use",
        "  drivetrain runs gc --dry-run\n  drivetrain runs gc /data/runs --yes\n"
        "  drivetrain runs gc /data/runs --keep-last 2 --dry-run",
    )
    parser.add_argument(
        "path", nargs="?", help="a directory of runs, or a run directory (default: DRIVETRAIN_STORAGE_PATH)"
    )
    parser.add_argument(
        "--keep-last",
        type=int,
        metavar="N",
        help="also delete all committed checkpoints but the latest N of each run, unless pinned or in use",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
    choice.add_argument("--yes", action="store_true", help="delete")


def _gc(arguments: argparse.Namespace) -> int:
    if arguments.keep_last is not None and arguments.keep_last < 1:
        raise ConfigurationError(
            "runs gc --keep-last: expected at least 1, because the latest committed checkpoint is always kept, got "
            f"{arguments.keep_last}"
        )
    storage = find_storage(arguments.path)
    runs = list(readers_in(storage))
    if not runs:
        raise MissingError(
            f"runs gc: expected a run directory or a directory of runs, but there is no run in {storage.root}"
        )
    findings = [_inspect(run.storage, arguments.keep_last, delete=arguments.yes) for run in runs]
    deletable = any(finding.deletions for finding in findings)
    data = {
        "deleted": bool(arguments.yes),
        "bytes": sum(one["bytes"] for finding in findings for one in finding.deletions),
        "runs": [vars(finding) for finding in findings],
    }
    emit(arguments, data, lambda: _text(findings, deleted=arguments.yes))
    if deletable and not arguments.yes and not arguments.dry_run:
        raise ConfigurationError(
            "runs gc: nothing was deleted. Add --yes to delete these checkpoints, or --dry-run to only list them"
        )
    return OK


def _inspect(storage: Storage, keep_last: int | None, *, delete: bool) -> _Finding:
    """Find the checkpoints of a run that can be deleted, and delete them if requested."""
    finding = _Finding(storage.root)
    try:
        holder = find_holder(storage)
        if holder is not None and holder.is_certain:
            finding.skipped = f"in use by {holder.description}"
            return finding
        if holder is not None and not delete:
            finding.skipped = f"locked by {holder.description}, which may have exited; --yes checks this"
            return finding
        with contextlib.ExitStack() as stack:
            stack.enter_context(damage_of(storage.root))
            if delete:  # the lock keeps other drivers from changing the run meanwhile
                stack.enter_context(RunLock(storage, partial(Console().print, error=True)).acquired())
            _tidy(storage, keep_last, finding, delete=delete)
    except RunInUseError as error:
        finding.skipped = str(error)
    except StorageError as error:
        finding.skipped = f"not changed: {error}"
    return finding


def _tidy(storage: Storage, keep_last: int | None, finding: _Finding, *, delete: bool) -> None:
    storage.require_known_version()
    damage: list[str] = []
    checkpoints = CheckpointManager(storage, warn=damage.append)
    if damage:
        raise StorageError(damage[0])
    try:
        old = []
        if keep_last is not None:
            usable = checkpoints.verify()  # the latest checkpoint that is not damaged must be kept
            rules = CheckpointConfig(num_to_keep=keep_last)
            old = [entry for entry in checkpoints.droppable(rules) if entry != usable]
        left = [
            _deletion(storage, name, "never committed, or dropped by retention") for name in checkpoints.leftovers()
        ]
        dropped = [_deletion(storage, entry.name, f"not among the latest {keep_last}") for entry in old]
        if delete:
            swept, _ = checkpoints.sweep()
            left = [one for one in left if one["name"] in swept]  # a checkpoint that a process reads was not deleted
            checkpoints.drop(old)
        finding.deletions = left + dropped
    finally:
        checkpoints.close()


def _deletion(storage: Storage, name: str, why: str) -> dict[str, Any]:
    return {"name": name, "bytes": sum(storage.walk(name).values()), "why": why}


def _text(findings: list[_Finding], *, deleted: bool) -> str:
    rows = [
        [finding.run.rstrip("/").rpartition("/")[2], one["name"], bytes_text(one["bytes"]), one["why"]]
        for finding in findings
        for one in finding.deletions
    ]
    lines = [f"skipped: {finding.run}: {finding.skipped}" for finding in findings if finding.skipped]
    if rows:
        lines.append(table(["RUN", "DELETED" if deleted else "WOULD BE DELETED", "SIZE", "WHY"], rows))
        total = bytes_text(sum(one["bytes"] for finding in findings for one in finding.deletions))
        lines.append(f"{total} {'deleted' if deleted else 'could be deleted'}")
    else:
        lines.append("nothing to delete")
    return "\n".join(lines)
