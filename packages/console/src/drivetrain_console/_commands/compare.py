"""``drivetrain runs compare``: shows the results of runs and the settings that differ between the runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from drivetrain import ConfigurationError
from drivetrain.plugin.callbacks import reported_metrics
from drivetrain.plugin.reading import damage_of
from drivetrain.plugin.storage import Storage
from drivetrain.runs import Curve, CurveReader, RunReader, RunRecord
from drivetrain_console._commands.output import OK, Commands, MissingError, add_command, emit, find_run
from drivetrain_console._views.plot import plot
from drivetrain_console._views.terminal import amount, duration, table

__all__ = ["add_compare"]


def add_compare(commands: Commands) -> None:
    """Add ``runs compare``."""
    parser = add_command(
        commands,
        "compare",
        _compare,
        "compare the settings and the results of runs",
        "  drivetrain runs compare baseline wider\n  drivetrain runs compare baseline wider --metric loss",
    )
    parser.add_argument("runs", nargs="+", metavar="run", help="directories, URIs or names of runs")
    parser.add_argument("--metric", metavar="NAME", help="also plot rank 0's curves of this metric")


class _ComparedRun(NamedTuple):
    """A run, and rank 0's curve of each metric, by metric name."""

    record: RunRecord
    curves: Mapping[str, Curve]


class _Row(NamedTuple):
    """A row of the comparison: the name of a property, and its value for each run."""

    what: str
    values: list[Any]


def _compare(arguments: argparse.Namespace) -> int:
    if len(arguments.runs) < 2:
        raise ConfigurationError("runs compare: expected two runs or more, got one")
    with damage_of("runs compare"):
        runs = [_read(find_run(run)) for run in arguments.runs]
        rows = [*_general_rows(runs), *_different_settings(runs), *_metric_rows(runs)]
    data: dict[str, Any] = {
        "runs": [run.record.summary() for run in runs],
        "rows": [{"what": row.what, "values": row.values} for row in rows],
    }
    emit(arguments, data, lambda: _text(runs, rows, arguments.metric), colored=True)
    return OK


def _read(storage: Storage) -> _ComparedRun:
    reader = CurveReader(storage)
    reader.update()
    return _ComparedRun(
        RunReader(storage).record(),
        {metric: curve for (rank, metric), curve in reader.curves().items() if rank == 0},
    )


def _text(runs: Sequence[_ComparedRun], rows: Sequence[_Row], metric: str | None) -> str:
    shown = [[row.what, *map(amount, row.values)] for row in rows]
    text = table(["", *(run.record.name for run in runs)], shown, wrap=True)
    if not metric:
        return text
    series = {run.record.name: run.curves[metric].points() for run in runs if metric in run.curves}
    if not series:
        raise MissingError(f"--metric: expected a metric that rank 0 has reported, got {metric!r}")
    return f"{text}\n\n{plot(series, title=metric)}"


def _general_rows(runs: Sequence[_ComparedRun]) -> Iterator[_Row]:
    """Yield the rows that every comparison shows, such as the status and the duration."""
    records = [run.record for run in runs]
    summaries = [record.summary() for record in records]
    yield _Row("status", [record.status for record in records])
    yield _Row("duration", [duration(record.duration_s) for record in records])
    for what in ("attempts", "workers", "reports", "checkpoints"):
        yield _Row(what, [summary[what] for summary in summaries])


def _different_settings(runs: Sequence[_ComparedRun]) -> Iterator[_Row]:
    """Yield the settings that differ between the runs."""
    settings = [_settings(run.record) for run in runs]
    for name in dict.fromkeys(name for one in settings for name in one):
        values = [one.get(name) for one in settings]
        if len({str(value) for value in values}) > 1:
            yield _Row(name, values)


def _settings(record: RunRecord) -> dict[str, Any]:
    """Return the settings of a run, and the versions of Python and of the packages that it used."""
    facts = record.facts
    settings = {name: facts.get(name) for name in ("train_function", "trainer", "train_loop_config", "scaling_config")}
    packages = record.history.environment.get("packages", {})
    settings |= {f"{name} (driver)": version for name, version in packages.items()}
    settings["python"] = facts.get("python")
    settings["drivetrain"] = facts.get("drivetrain")
    return settings


def _metric_rows(runs: Sequence[_ComparedRun]) -> Iterator[_Row]:
    """Yield three rows for each metric: the last, the minimum and the maximum value."""
    latest = [reported_metrics(run.record.metrics) for run in runs]
    for metric in dict.fromkeys(name for run in runs for name in run.curves if not name.startswith("_")):
        ranges = [_range(run.curves.get(metric)) for run in runs]
        yield _Row(f"{metric}, last", [metrics.get(metric) for metrics in latest])
        yield _Row(f"{metric}, min", [lowest for lowest, _ in ranges])
        yield _Row(f"{metric}, max", [highest for _, highest in ranges])


def _range(curve: Curve | None) -> tuple[float | None, float | None]:
    """Return the minimum and the maximum of a curve, or ``(None, None)`` if it has no finite values."""
    if curve is None or math.isnan(curve.lowest):
        return None, None
    return curve.lowest, curve.highest
