"""``drivetrain checkpoints list|verify|export``: the committed checkpoints of a run."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain import ConfigurationError, StorageError
from drivetrain.plugin.callbacks import CommittedCheckpoint, flatten, has_metric, reported_metrics
from drivetrain.plugin.files import RUN_FILE, link_error
from drivetrain.plugin.storage import Storage, checkpoint_in, rank_checkpoints, read_manifest
from drivetrain.runs import RunReader
from drivetrain_console._commands.output import BAD, OK, Commands, MissingError, add_command, emit, find_run
from drivetrain_console._views.terminal import amount, bytes_text, moment, table

__all__ = ["add_checkpoints"]


def add_checkpoints(commands: Commands) -> None:
    """Add ``checkpoints`` and its subcommands."""
    group = commands.add_parser("checkpoints", help="list, verify and export the checkpoints of a run")
    group.set_defaults(usage_of=group)
    subcommands = group.add_subparsers(metavar="COMMAND")

    parser = add_command(
        subcommands,
        "list",
        _list,
        "list the committed checkpoints of a run, oldest first",
        "  drivetrain checkpoints list my_run\n  drivetrain checkpoints list s3://bucket/runs/my_run --json",
    )
    parser.add_argument("run", help="a run's directory or URI, or its name in the default storage path")

    parser = add_command(
        subcommands,
        "verify",
        _verify,
        "verify that all files of checkpoints exist and have the right size; exit code 1 if not",
        "  drivetrain checkpoints verify my_run\n  drivetrain checkpoints verify my_run checkpoint_000004 --checksums",
    )
    parser.add_argument("run", help="a run's directory, URI or name")
    parser.add_argument("checkpoint", nargs="?", help="the name of a checkpoint (default: all committed checkpoints)")
    parser.add_argument("--checksums", action="store_true", help="also verify stored checksums of local files")

    parser = add_command(
        subcommands,
        "export",
        _export,
        "copy the files of a checkpoint to a directory",
        "  drivetrain checkpoints export my_run latest ./model\n"
        "  drivetrain checkpoints export my_run best ./model --metric accuracy --mode max\n"
        "  drivetrain checkpoints export my_run checkpoint_000004 ./model --include '*.safetensors'",
    )
    parser.add_argument("run", help="a run's directory, URI or name")
    parser.add_argument(
        "checkpoint", help="the name of a checkpoint, or latest, or best (requires --metric and --mode)"
    )
    parser.add_argument("target", type=Path, help="a new or empty directory")
    parser.add_argument("--metric", help="the metric for best")
    parser.add_argument(
        "--mode", choices=("max", "min"), help="max if larger values are better, min if smaller values are"
    )
    parser.add_argument("--include", action="append", metavar="PATTERN", help="copy only matching files; repeatable")
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help="do not copy matching files; repeatable")


def _list(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    checkpoints = []
    for entry in read_manifest(storage):
        size, files = RunReader(storage).checkpoint_size(entry.name) or (None, None)
        link = storage.find_link(entry.name)
        checkpoints.append(
            {
                **asdict(entry),
                "metrics": flatten(entry.metrics),
                "bytes": size,
                "files": files,
                "pinned": link is None and checkpoint_in(storage, entry.name).is_pinned(),
                "damage": None if link is None else str(link_error(link)),
                "path": storage.path(entry.name),
            }
        )
    emit(arguments, checkpoints, lambda: _list_text(checkpoints, storage))
    return OK


def _list_text(checkpoints: list[dict[str, Any]], storage: Storage) -> str:
    if not checkpoints:
        return f"no committed checkpoints in {storage.root}"
    rows = [
        [
            checkpoint["name"],
            str(checkpoint["iteration"]),
            moment(checkpoint["time"]),
            bytes_text(checkpoint["bytes"]),
            amount(checkpoint["files"]),
            "yes" if checkpoint["pinned"] else "",
            ", ".join(f"{name} {amount(value)}" for name, value in reported_metrics(checkpoint["metrics"]).items()),
        ]
        for checkpoint in checkpoints
    ]
    header = ["CHECKPOINT", "REPORT", "COMMITTED", "SIZE", "FILES", "PINNED", "METRICS"]
    notes = [f"  {checkpoint['name']}: {checkpoint['damage']}" for checkpoint in checkpoints if checkpoint["damage"]]
    return "\n".join([table(header, rows, droppable=["PINNED", "FILES"]), *(["damaged:", *notes] if notes else [])])


def _verify(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    entries = read_manifest(storage)
    if arguments.checkpoint:
        entries = [_find(entries, arguments.checkpoint, storage)]
    if not entries:
        raise MissingError(
            f"checkpoints verify: expected a run with committed checkpoints, but there are none in {storage.root}"
        )
    results = []
    for entry in entries:
        damage = None
        try:
            checkpoint_in(storage, entry.name).verify(checksums=arguments.checksums)
        except StorageError as error:
            damage = str(error)
        results.append({"name": entry.name, "ok": damage is None, "damage": damage})
    emit(arguments, results, lambda: "\n".join(f"{result['name']}  {result['damage'] or 'ok'}" for result in results))
    return OK if all(result["ok"] for result in results) else BAD


def _export(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    entries = read_manifest(storage)
    target: Path = arguments.target
    if arguments.checkpoint == "best":
        if not arguments.metric or not arguments.mode:
            raise ConfigurationError("checkpoints export best: expected --metric NAME and --mode max or min")
        candidates = [entry for entry in entries if has_metric(entry.metrics, arguments.metric)]
        if not candidates:
            known = dict.fromkeys(name for entry in entries for name in reported_metrics(entry.metrics))
            raise MissingError(
                f"--metric: expected a metric of a kept checkpoint in {storage.root}, got {arguments.metric!r}. "
                f"Known metrics: {', '.join(known) or 'none'}"
            )
        entry = rank_checkpoints(candidates, arguments.metric, arguments.mode)[0]
    else:
        entry = _find(entries, arguments.checkpoint, storage)
    _check_target(target)
    with _complete_or_nothing(target) as copy:
        checkpoint_in(storage, entry.name).to_directory(copy, include=arguments.include, exclude=arguments.exclude)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    data = {"checkpoint": entry.name, "iteration": entry.iteration, "path": str(target.absolute()), "bytes": size}
    emit(arguments, data, lambda: f"exported {entry.name} (report {entry.iteration}, {bytes_text(size)}) to {target}")
    return OK


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"checkpoints export: expected a new or empty directory, got {target}")
    place = target.resolve()
    if (run := next((each for each in (place, *place.parents) if (each / RUN_FILE).exists()), None)) is not None:
        raise ConfigurationError(
            f"checkpoints export: expected a directory outside of runs, got {target} in "
            f"the run {run}. Choose another target"
        )


@contextlib.contextmanager
def _complete_or_nothing(target: Path) -> Iterator[Path]:
    """Yield a new directory, which becomes the target at the end of a ``with`` block. After an error, delete it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            yield Path(directory, "files")
            os.replace(Path(directory, "files"), target)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"checkpoints export: {target} cannot be written ({error})") from error


def _find(entries: list[CommittedCheckpoint], name: str, storage: Storage) -> CommittedCheckpoint:
    if name == "latest" and entries:
        return entries[-1]
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in entries[-5:]) or "none"
    raise MissingError(f"expected a committed checkpoint in {storage.root}, got {name!r}. Latest checkpoints: {known}")
