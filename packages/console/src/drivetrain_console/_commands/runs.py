"""``drivetrain runs list|show|plot|report|serve``: lists runs, and shows their results in several forms."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drivetrain import ConfigurationError
from drivetrain.plugin.backends import gpu_holders
from drivetrain.plugin.callbacks import printable, redact, reported_metrics
from drivetrain.plugin.reading import damage_of, is_number
from drivetrain.runs import RunReader, RunRecord, readers_in
from drivetrain_console._commands.compare import add_compare
from drivetrain_console._commands.gc import add_gc
from drivetrain_console._commands.output import (
    OK,
    Commands,
    MissingError,
    add_command,
    emit,
    find_run,
    find_storage,
    write,
)
from drivetrain_console._commands.run import add_resume
from drivetrain_console._commands.tail import add_tail
from drivetrain_console._views.terminal import amount, bytes_text, duration, moment, table, wrapped

__all__ = ["add_runs"]

_METRICS_IN_LIST = 3
_COUNTERS = ("step", "global_step", "epoch", "iteration", "batch")
"""Metrics that repeat the number of reports, which has its own column. Other metrics are shown first."""


def add_runs(commands: Commands) -> None:
    """Add ``runs`` and its subcommands."""
    group = commands.add_parser("runs", help="list, show, plot, compare, follow, resume and clean up runs")
    group.set_defaults(usage_of=group)
    subcommands = group.add_subparsers(metavar="COMMAND")

    for add in (_add_list, _add_show, _add_plot, add_compare, _add_report, _add_serve, add_tail, add_resume, add_gc):
        add(subcommands)


def _add_list(commands: Commands) -> None:
    parser = add_command(
        commands,
        "list",
        _list,
        "list the runs in a directory, newest first",
        "  drivetrain runs list\n  drivetrain runs list s3://bucket/runs --json | jq -r '.[].name'",
    )
    parser.add_argument("path", nargs="?", help="a directory of runs (default: DRIVETRAIN_STORAGE_PATH)")
    parser.add_argument("--status", help="only runs with this status, such as running or failed")


def _list(arguments: argparse.Namespace) -> int:
    storage = find_storage(arguments.path)
    if not storage.list_names()[0] and not storage.exists(""):
        raise MissingError(f"runs list: expected a directory of runs, but {storage.root} does not exist")
    summaries = sorted((run.summary() for run in readers_in(storage)), key=lambda summary: -summary["began"])
    if arguments.status:
        summaries = [summary for summary in summaries if summary["status"] == arguments.status]
    emit(arguments, summaries, lambda: _list_text(summaries, storage.root))
    return OK


def _list_text(summaries: list[dict[str, Any]], location: str) -> str:
    if not summaries:
        return f"no runs in {location}"
    names = dict.fromkeys(
        name
        for summary in summaries
        for name, value in summary["metrics"].items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    metrics = sorted(names, key=lambda name: name in _COUNTERS)[:_METRICS_IN_LIST]
    header = ["RUN", "STATUS", "STARTED", "DURATION", "WORKERS", "REPORTS", "CHECKPOINTS", *metrics]
    rows = [
        [
            summary["name"],
            summary["status"],
            moment(summary["began"]),
            duration(summary["duration_s"]),
            amount(summary["workers"]),
            str(summary["reports"]),
            str(summary["checkpoints"]),
            *(amount(summary["metrics"].get(name)) for name in metrics),
        ]
        for summary in summaries
    ]
    text = table(header, rows, droppable=["CHECKPOINTS", "WORKERS", "STARTED", *metrics[1:]])
    unreadable = [summary for summary in summaries if summary["status"] == "unreadable"]
    notes = [wrapped(f"  {printable(summary['name'])}: ", summary["error"]) for summary in unreadable]
    gpus = [f"GPUs of this machine:\n  {holders}"] if (holders := "\n  ".join(map(str, gpu_holders()))) else []
    return "\n".join([text, *gpus, *(["unreadable:", *notes] if notes else [])])


def _add_show(commands: Commands) -> None:
    parser = add_command(
        commands,
        "show",
        _show,
        "show a run: attempts, failures, checkpoints, configuration and environment",
        "  drivetrain runs show my_run\n  drivetrain runs show /data/runs/my_run --json | jq .status",
    )
    parser.add_argument("run", help="a run's directory or URI, or its name in the default storage path")


def _show(arguments: argparse.Namespace) -> int:
    storage = find_run(arguments.run)
    with damage_of(storage.root):
        record = RunReader(storage).record()
        details, text = record.details(), _show_text(record)
    emit(arguments, details, lambda: text)
    return OK


def _show_text(record: RunRecord) -> str:
    facts = record.facts
    pairs = [
        ("status", record.status + (f": {record.error_line}" if record.error_line else "")),
        ("in use by", record.holder),
        ("directory", record.location),
        ("started", f"{moment(record.began)}, {duration(record.duration_s)} until {_end_of(record)}"),
        ("train function", f"{facts.get('train_function') or '?'} ({facts.get('trainer')})"),
        ("config", facts.get("train_loop_config")),
        ("scaling", facts.get("scaling_config")),
        ("reports", f"{record.iterations} of rank 0"),
        ("latest", ", ".join(f"{name} {amount(value)}" for name, value in reported_metrics(record.metrics).items())),
        ("driver", _driver_text(record.history.environment)),
    ]
    width = max(len(name) for name, _ in pairs)
    parts = [record.name, "\n".join(wrapped(f"  {name:<{width}}  ", str(value)) for name, value in pairs if value)]
    if record.history.attempts:
        several = record.history.starts > 1  # each driver of a run counts its attempts from 0
        rows = [
            [
                f"{attempt.number} (driver {attempt.start})" if several else str(attempt.number),
                moment(attempt.began),
                duration((attempt.ended or record.last_time) - attempt.began or None),  # None if it is unknown
                _places(attempt.workers),
                str(attempt.resumed_from or "-"),
                "; ".join(
                    [f"{loss.get('summary')} (survived)" for loss in attempt.survived]
                    + ([str(attempt.failure.get("summary"))] if attempt.failure else [])
                ),
            ]
            for attempt in record.history.attempts
        ]
        header = ["ATTEMPT", "STARTED", "DURATION", "WORKERS", "RESUMED FROM", "FAILURE"]
        parts.append(table(header, rows, droppable=["STARTED", "RESUMED FROM"], wrap=True))
        if nodes := _nodes(record.history.attempts[-1].workers):
            parts.append(table(["NODE", "ADDRESS", "RANKS", "GPUS", "VERSIONS"], nodes, wrap=True))
    if record.checkpoints:
        rows = [
            [entry.name, str(entry.iteration), moment(entry.time), _metrics_text(entry.metrics)]
            for entry in record.checkpoints
        ]
        parts.append(table(["CHECKPOINT", "REPORT", "COMMITTED", "METRICS"], rows))
    if record.history.notes:
        rows = [[moment(note["time"]), note["source"], note["text"]] for note in record.history.notes]
        parts.append(table(["NOTED", "BY", "EVENT"], rows, droppable=["BY"], wrap=True))
    if record.error:
        parts.append(f"error: {record.error['message']}")
    return "\n\n".join(parts)


def _places(workers: list[dict[str, Any]]) -> str:
    """Describe the number of workers on each host, such as ``2 on node-1, 2 on node-2``."""
    hosts = Counter(str(worker.get("hostname")) for worker in workers)
    return ", ".join(f"{count} on {host}" for host, count in hosts.items()) or "in the driver"


def _nodes(workers: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each node of an attempt; none if there is only the driver's node, without known GPUs."""
    nodes: dict[str, list[dict[str, Any]]] = {}
    for worker in workers:
        nodes.setdefault(str(worker.get("node_id")), []).append(worker)
    if len(nodes) < 2 and not any(worker.get("accelerator_names") for worker in workers):
        return []
    common = workers[0].get("versions") or {}
    return [
        [
            str(members[0].get("hostname")),
            str(members[0].get("ip")),
            _ranks([int(worker["rank"]) for worker in members if is_number(worker.get("rank"))]),
            _counted(str(name) for worker in members for name in worker.get("accelerator_names") or ()) or "-",
            ", ".join(f"{name} {version}" for name, version in (members[0].get("versions") or common).items()) or "-",
        ]
        for members in nodes.values()
    ]


def _ranks(ranks: list[int]) -> str:
    is_consecutive = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if is_consecutive else ", ".join(map(str, ranks))


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _end_of(record: RunRecord) -> str:
    return "its end" if record.ended else "the last activity"


def _driver_text(environment: dict[str, Any]) -> str:
    if not environment:
        return ""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    size = environment.get("memory_bytes")
    memory = bytes_text(size if is_number(size) else None)
    facts = [environment.get(name) for name in ("host", "cpus", "python")]
    return f"{facts[0]}, {facts[1]} CPUs, {memory}, Python {facts[2]}, {packages}"


def _metrics_text(metrics: Any) -> str:
    return ", ".join(f"{name} {amount(value)}" for name, value in reported_metrics(metrics).items())


def _add_plot(commands: Commands) -> None:
    parser = add_command(
        commands,
        "plot",
        _plot,
        "plot metrics, in the terminal or to a PNG or SVG file",
        "  drivetrain runs plot my_run --metric loss\n  drivetrain runs plot my_run --metric loss -o loss.png",
    )
    parser.add_argument("run", help="a run's directory, URI or name")
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="a metric to plot; repeatable (default: all numbers)"
    )
    parser.add_argument(
        "--rank", action="append", type=int, metavar="N", help="a rank to plot; repeatable (default: all)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a .png, .svg or .pdf file instead")
    parser.add_argument("--log", action="store_true", help="use a logarithmic value axis")
    parser.add_argument(
        "--height", type=int, default=16, metavar="LINES", help="height of each plot in the terminal (default: 16)"
    )


def _plot(arguments: argparse.Namespace) -> int:
    from drivetrain_console._views.figures import draw_figure
    from drivetrain_console._views.plot import plot

    output: Path | None = arguments.output
    if output is not None and output.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigurationError(f"runs plot -o: expected a .png, .svg or .pdf file, got {output}")
    storage = find_run(arguments.run)
    try:
        panels = RunReader(storage).curves(arguments.metric or (), arguments.rank)
    except ValueError as error:
        raise MissingError(f"{error} (run: {storage.root})") from None
    if arguments.json:
        data = {
            metric: {name: {**curve.export(), "lowest": curve.lowest, "highest": curve.highest}}
            for metric, curves in panels.items()
            for name, curve in curves.items()
        }
        emit(arguments, data, str)
    elif output is not None:
        draw_figure(panels, log=arguments.log).savefig(output)
        write(str(output))
    else:
        for metric, curves in panels.items():
            series = {name: curve.points() for name, curve in curves.items()}
            text = plot(series, title=metric, height=max(3, arguments.height), log=arguments.log)
            write(text, colored=True)
    return OK


def _add_report(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        _report,
        "write a self-contained HTML report of a run",
        "  drivetrain runs report my_run\n  drivetrain runs report my_run -o /tmp/my_run.html",
    )
    parser.add_argument("run", help="a run's directory, URI or name")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: RUN.html in the working directory)",
    )


def _report(arguments: argparse.Namespace) -> int:
    from drivetrain_console._views.page import write_page

    storage = find_run(arguments.run)
    path: Path = arguments.output or Path(f"{storage.root.rstrip('/').rpartition('/')[2]}.html")
    write_page(storage, path)
    emit(arguments, {"path": str(path.absolute()), "bytes": path.stat().st_size}, lambda: str(path))
    return OK


def _add_serve(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        _serve,
        "serve live pages of runs for a browser, until Ctrl-C",
        "  drivetrain runs serve\n  drivetrain runs serve /data/runs --port 8080\n"
        "  drivetrain runs serve --host 0.0.0.0      also for other machines, with a token",
    )
    parser.add_argument(
        "path", nargs="?", help="a directory of runs, or a run directory (default: DRIVETRAIN_STORAGE_PATH)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, only this machine)"
    )
    parser.add_argument("--port", type=int, default=0, help="the port (default: any free port)")
    parser.add_argument(
        "--token",
        help="the token that clients must send (default: a random token unless only this machine can connect)",
    )


def _serve(arguments: argparse.Namespace) -> int:
    from drivetrain_console._views.server import RunsServer

    storage = find_storage(arguments.path)
    if not storage.list_names()[0] and not storage.exists(""):
        raise MissingError(f"runs serve: expected a directory of runs, but {storage.root} does not exist")
    server = RunsServer(storage, host=arguments.host, port=arguments.port, token=arguments.token)
    text = f"serving the runs in {redact(storage.root)}: {server.url}\nPress Ctrl-C to stop"
    write(json.dumps({"url": server.url}) if arguments.json else text, show_secrets=True)
    if not server.is_loopback:
        write("warning: plain HTTP; anyone who can read the network traffic can read the token", error=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server.serve()
    return OK
