"""The report: Markdown for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.runner import Row


def failed(rows: Sequence[Row]) -> bool:
    """Return True if the command fails: a check failed, a check was not run for lack of time, or no check passed."""
    results = {row.result for row in rows}
    return bool(results & {"failed", "not run"}) or "passed" not in results


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.result for row in rows)
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped", "not run") if counts[name])


def write(directory: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Write ``report.md`` and ``report.json``, and return their paths.

    Args:
        directory: the directory for the files. It is created if it does not exist.
        facts: the start time, duration, device, commit and machine.
        rows: the results.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = {**facts, "failed": failed(rows), "checks": [dataclasses.asdict(row) for row in rows]}
    texts = {"report.md": "\n".join(markdown(facts, rows)) + "\n", "report.json": json.dumps(data, indent=2) + "\n"}
    for name, text in texts.items():
        (directory / name).write_text(text)
    return [directory / name for name in texts]


def markdown(facts: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    machine = facts["machine"]
    yield from ("# GPU checks", "")
    yield f"{summary(rows)}, in {facts['seconds']:.0f} s; started {facts['started']}, commit {facts['commit']}."
    if facts["device"] == "cpu":
        yield from ("", "**Run with `--device cpu`: this tests the checks themselves and says nothing about GPUs.**")
    yield ""
    for gpu in machine["gpus"]:
        yield f"- {gpu['name']}, {gpu['memory_mib']} MiB, compute capability {gpu['compute_capability']}"
    if machine["gpus"]:
        yield f"- CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, NCCL {machine['nccl']}"
    yield f"- {machine['cpus']} CPUs, Python {machine['python']}, {machine['system']}"
    yield "- " + ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    yield from ("", "| check | result | seconds | figures |", "|---|---|---|---|")
    for row in rows:
        figures = "; ".join(f"{name} {_short(value)}" for name, value in row.figures.items())
        details = figures if row.result == "passed" else row.reason.partition("\n")[0]
        yield f"| `{row.name}`: {row.title} | {row.result} | {row.seconds:.1f} | {details.replace('|', '¦')} |"
    for row in rows:
        if row.log or "\n" in row.reason:
            yield from ("", f"## {row.name}", "", "````text", row.reason, "", row.log, "````")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
