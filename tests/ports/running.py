"""Runs a program under its launcher and under drivetrain, and compares the recorded losses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ports.port import Edit, Port, changed_lines, git

_LIMIT_S = 600.0

Losses = dict[tuple[int, int], float]
"""The losses by rank and step."""


@dataclass
class Run:
    """A recorded run: its losses, the steps whose loss changed when repeated, and the first step of the retry."""

    losses: Losses
    changed: list[tuple[int, int]]
    resumed_at: int | None


class ProgramFailedError(Exception):
    """A program ended with an exit code other than 0."""


def compare(port: Port, checkout: Path, directory: Path) -> dict[str, object]:
    """Run the program and its port, and return the row of the table."""

    def train(name: str, edits: Sequence[Edit], command: Sequence[str], kill: str = "") -> Run:
        port.write(checkout, directory / name, edits)
        return run(port, directory / name, command, {} if name == "original" else port.environment, kill)

    ported = [*port.prepare, *port.changes]
    original = train("original", port.prepare, _own_command(port))
    unchanged = train("unchanged", port.prepare, _drivetrain_command(port, port.workers))
    undisturbed = train("port", ported, _drivetrain_command(port, port.workers, *port.options))
    added, removed = changed_lines(directory / "original", directory / "port")
    row: dict[str, object] = {
        "program": port.name,
        "repository": port.repository,
        "script": port.script,
        "commit": git(checkout, "rev-parse", "HEAD"),
        "unchanged": _describe(original.losses, unchanged),
        "changed_lines": f"+{added} -{removed}",
        "losses": _describe(original.losses, undisturbed),
    }

    retried = [*ported, *port.resume_changes]
    workers = port.resume_workers or port.workers
    if workers != port.workers or port.resume_changes:
        undisturbed = train("undisturbed", retried, _drivetrain_command(port, workers, *port.options))
    command = _drivetrain_command(port, workers, *port.options, "--max-failures", "1")
    killed = train("killed", retried, command, port.kill)
    if killed.resumed_at is None:
        raise ProgramFailedError(f"expected a retry after the kill of {port.kill}, got none")
    restarted = killed.resumed_at == min(step for _, step in killed.losses)
    row["resume"] = "restarted from the beginning" if restarted else _describe(undisturbed.losses, killed)
    row["killed"], row["resumed_at"] = port.kill, killed.resumed_at
    return row


def run(port: Port, directory: Path, command: Sequence[str], variables: Mapping[str, str], kill: str) -> Run:
    """Run a command in the folder of the program, and read what it recorded."""
    record, log = directory / "losses.jsonl", directory / "output.txt"
    environment = {
        **os.environ,
        **variables,
        "PORTS_RECORD": str(record),
        "PORTS_KILL": kill,
        "PORTS_STEP_S": "0.3" if kill else "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
        "DRIVETRAIN_STORAGE_PATH": str(directory / "runs"),
        "PYTHONPATH": str(directory / port.folder / "standins"),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=directory / port.folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        raise ProgramFailedError(f"exit code {code} of {' '.join(command)}\n{log.read_text()[-4000:]}")
    if kill and not Path(f"{record}.killed").exists():
        raise ProgramFailedError(f"expected the kill in rank and step {kill}, got a run that never reached it")
    return _read(record)


def _own_command(port: Port) -> list[str]:
    return [sys.executable, *port.launcher, Path(port.script).name, *port.arguments]


def _drivetrain_command(port: Port, workers: int, *options: str) -> list[str]:
    chosen = ["--num-workers", str(workers), *options] if workers else []
    command = [sys.executable, "-m", "drivetrain", "run", Path(port.script).name, *chosen]
    return [*command, "--", *port.arguments]


def _read(record: Path) -> Run:
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    losses: Losses = {}
    changed = []
    first: dict[int, int] = {}
    for row in rows:
        key = row["rank"], row["step"]
        if losses.setdefault(key, row["loss"]) != row["loss"]:
            changed.append(key)
        first.setdefault(row["process"], row["step"])
    processes = list(first)
    later = [first[process] for process in processes if first[process] != min(first.values())]
    retried = len(processes) > len({row["rank"] for row in rows})
    return Run(losses, changed, (min(later) if later else min(first.values())) if retried else None)


def _describe(expected: Losses, run: Run) -> str:
    if run.losses.keys() != expected.keys():
        only = sorted(run.losses.keys() ^ expected.keys())
        return f"other steps: {only[:4]} of {len(expected)}"
    differ = sorted({key for key in expected if run.losses[key] != expected[key]} | set(run.changed))
    if not differ:
        return "equal"
    rank, step = min(differ, key=lambda key: key[1])
    largest = max(abs(run.losses[key] - expected[key]) for key in differ)
    return f"differ from step {step} (rank {rank}), by up to {largest:.2g}"


def temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="drivetrain-ports-"))


__all__ = ["Edit", "ProgramFailedError", "compare", "temporary_directory"]
