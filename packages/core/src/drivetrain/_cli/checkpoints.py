"""``drivetrain checkpoints list|verify|export``: the committed checkpoints of a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain._base.metrics import flatten, has_metric, reported_metrics
from drivetrain._cli.output import BAD, OK, Commands, MissingError, add_command, emit, find_run
from drivetrain._storage.checkpoint import checkpoint_in
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import link_error
from drivetrain._storage.manifest import read_manifest
from drivetrain._storage.retention import rank_checkpoints
from drivetrain._views.records import checkpoint_sizes
from drivetrain._views.terminal import amount, bytes_text, moment, table
from drivetrain.errors import ConfigurationError, StorageError

__all__ = ["add_checkpoints"]


def add_checkpoints(commands: Commands) -> None:
    """Add ``checkpoints`` and what is under it."""
    group = commands.add_parser("checkpoints", help="list, verify and export the checkpoints of a run")
    group.set_defaults(usage_of=group)
    below = group.add_subparsers(metavar="COMMAND")

    parser = add_command(
        below,
        "list",
        _list,
        "list a run's committed checkpoints, the oldest first",
        "  drivetrain checkpoints list my_run\n  drivetrain checkpoints list s3://bucket/runs/my_run --json",
    )
    parser.add_argument("run", help="a run's directory or URI, or its name in the default storage path")

    parser = add_command(
        below,
        "verify",
        _verify,
        "make sure that every file of the checkpoints is there and as long as it was; status 1 if not",
        "  drivetrain checkpoints verify my_run\n  drivetrain checkpoints verify my_run checkpoint_000004 --checksums",
    )
    parser.add_argument("run", help="a run's directory, URI or name")
    parser.add_argument("checkpoint", nargs="?", help="which; default: all that are committed")
    parser.add_argument("--checksums", action="store_true", help="also read local files whose checksums were taken")

    parser = add_command(
        below,
        "export",
        _export,
        "copy a checkpoint's files into a directory",
        "  drivetrain checkpoints export my_run latest ./model\n"
        "  drivetrain checkpoints export my_run best ./model --metric accuracy --mode max\n"
        "  drivetrain checkpoints export my_run checkpoint_000004 ./model --include '*.safetensors'",
    )
    parser.add_argument("run", help="a run's directory, URI or name")
    parser.add_argument("checkpoint", help="its name, or latest, or best (with --metric)")
    parser.add_argument("target", type=Path, help="a directory that is new or empty")
    parser.add_argument("--metric", help="what best means")
    parser.add_argument("--mode", choices=("max", "min"), help="which end of the metric is better")
    parser.add_argument("--include", action="append", metavar="PATTERN", help="only these files; may be repeated")
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help="not these files; may be repeated")


def _list(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    found = []
    for entry in read_manifest(storage):
        size, files = checkpoint_sizes(storage, entry.name) or (None, None)
        link = storage.find_link(entry.name)
        found.append(
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
    emit(arguments, found, lambda: _list_text(found, storage))
    return OK


def _list_text(found: list[dict[str, Any]], storage: Storage) -> str:
    if not found:
        return f"no committed checkpoint in {storage.root}"
    rows = [
        [
            one["name"],
            str(one["iteration"]),
            moment(one["time"]),
            bytes_text(one["bytes"]),
            amount(one["files"]),
            "yes" if one["pinned"] else "",
            ", ".join(f"{name} {amount(value)}" for name, value in reported_metrics(one["metrics"]).items()),
        ]
        for one in found
    ]
    header = ["CHECKPOINT", "REPORT", "COMMITTED", "SIZE", "FILES", "PINNED", "METRICS"]
    notes = [f"  {one['name']}: {one['damage']}" for one in found if one["damage"]]
    return "\n".join([table(header, rows, spare=["PINNED", "FILES"]), *(["damaged:", *notes] if notes else [])])


def _verify(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    entries = read_manifest(storage)
    if arguments.checkpoint:
        entries = [_find(entries, arguments.checkpoint, storage)]
    if not entries:
        raise MissingError(
            f"checkpoints verify: expected a run with committed checkpoints, found none in {storage.root}"
        )
    found = []
    for entry in entries:
        damage = None
        try:
            checkpoint_in(storage, entry.name).verify(checksums=arguments.checksums)
        except StorageError as error:
            damage = str(error)
        found.append({"name": entry.name, "ok": damage is None, "damage": damage})
    emit(arguments, found, lambda: "\n".join(f"{one['name']}  {one['damage'] or 'ok'}" for one in found))
    return OK if all(one["ok"] for one in found) else BAD


def _export(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    entries = read_manifest(storage)
    target: Path = arguments.target
    if arguments.checkpoint == "best":
        if not arguments.metric or not arguments.mode:
            raise ConfigurationError("checkpoints export best: expected --metric NAME and --mode max or min")
        having = [entry for entry in entries if has_metric(entry.metrics, arguments.metric)]
        if not having:
            known = dict.fromkeys(name for entry in entries for name in reported_metrics(entry.metrics))
            raise MissingError(
                f"--metric: expected one that a kept checkpoint has, found no {arguments.metric!r} in {storage.root}; "
                f"there are: {', '.join(known) or 'none'}"
            )
        entry = rank_checkpoints(having, arguments.metric, arguments.mode)[0]
    else:
        entry = _find(entries, arguments.checkpoint, storage)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"checkpoints export: expected a directory that is new or empty, got {target}")
    checkpoint = checkpoint_in(storage, entry.name)
    checkpoint.to_directory(target, include=arguments.include, exclude=arguments.exclude)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    data = {"checkpoint": entry.name, "iteration": entry.iteration, "path": str(target.absolute()), "bytes": size}
    emit(arguments, data, lambda: f"{entry.name} (report {entry.iteration}, {bytes_text(size)}) is in {target}")
    return OK


def _find(entries: list[CommittedCheckpoint], name: str, storage: Storage) -> CommittedCheckpoint:
    if name == "latest" and entries:
        return entries[-1]
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in entries[-5:]) or "none"
    raise MissingError(f"expected a committed checkpoint, found no {name!r} in {storage.root}; the last are: {known}")
