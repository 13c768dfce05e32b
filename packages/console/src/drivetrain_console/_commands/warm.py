"""``drivetrain warm``: starts, lists and stops the processes from which the next run of a script starts at once."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from drivetrain import ConfigurationError
from drivetrain.plugin.warm import KEEP_WARM, WarmServer, seconds_of, warm_servers
from drivetrain_console._commands.output import BAD, OK, Commands, MissingError, add_json, emit, write
from drivetrain_console._views.terminal import bytes_text

__all__ = ["add_keep_warm", "add_warm"]

_DEFAULT_S = 600.0
_EXAMPLES = """\
examples:
  drivetrain warm start train.py      make the imports of a script, and keep them
  drivetrain run train.py             starts at once
  drivetrain run --keep-warm 10m train.py     the same, without the first command
  drivetrain warm status
  drivetrain warm stop
"""


def add_keep_warm(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--keep-warm`` of ``run``."""
    parser.add_argument(
        "--keep-warm",
        type=_seconds,
        default=_default(),
        metavar="TIME",
        help="for a script that runs as the driver: keep a process with its imports for this time after the run, such "
        "as 10m, from which the next run starts at once; 0 to use no such process (default: DRIVETRAIN_KEEP_WARM)",
    )


def _seconds(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _default() -> float | None:
    """Return the time in seconds that the environment variable sets; None if there is none.

    Raises:
        ConfigurationError: the variable contains something else.
    """
    text = os.environ.get(KEEP_WARM)
    try:
        return seconds_of(text) if text else None
    except ValueError as error:
        raise ConfigurationError(f"the environment variable {KEEP_WARM}: {error}") from error


def add_warm(commands: Commands) -> None:
    """Add ``warm``."""
    summary = "keep the imports of a script in a process, from which its next run starts at once"
    parser = commands.add_parser(
        "warm",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(usage_of=parser)
    actions = parser.add_subparsers(metavar="ACTION")
    start = actions.add_parser("start", help="make the imports at the top of a script, and keep them")
    start.add_argument("script", help="the script")
    start.add_argument(
        "--keep-warm",
        type=_seconds,
        default=_default() or _DEFAULT_S,
        metavar="TIME",
        help="how long the process is kept after the last run, such as 2h (default: DRIVETRAIN_KEEP_WARM, or 10m)",
    )
    start.set_defaults(handler=_start)
    status = actions.add_parser("status", help="list the processes")
    status.set_defaults(handler=_status)
    add_json(status)
    stop = actions.add_parser("stop", help="end processes, after their runs if there are any")
    stop.add_argument("pids", type=int, nargs="*", metavar="PID", help="the processes (default: all)")
    stop.set_defaults(handler=_stop)


def _start(arguments: argparse.Namespace) -> int:
    if not Path(arguments.script).is_file():
        raise ConfigurationError(f"warm start: expected a script that exists, got the missing file {arguments.script}")
    if arguments.keep_warm == 0:
        raise ConfigurationError("warm start --keep-warm: expected a time above 0, got 0")
    arguments.finally_run = partial(_start_here, arguments.script, arguments.keep_warm)
    return OK


def _start_here(script: str, keep_s: float) -> int:
    from drivetrain.plugin.drivers import start_warm_server

    server = start_warm_server(script, keep_s)
    if server is None:
        write(
            "drivetrain: warm start: this process cannot be kept. The page 'The command line' lists the reasons, such "
            f"as a package at the top of {script} that starts threads, or an open accelerator",
            error=True,
        )
        return BAD
    write(_text(server))
    return OK


def _status(arguments: argparse.Namespace) -> int:
    servers = warm_servers()
    names = ("pid", "modules", "runs", "served", "remaining_s", "memory_bytes")
    data = [{name: getattr(server, name) for name in names} for server in servers]
    emit(arguments, data, lambda: "\n".join(map(_text, servers)) or "no process is kept warm")
    return OK


def _stop(arguments: argparse.Namespace) -> int:
    servers = {server.pid: server for server in warm_servers()}
    if unknown := [str(pid) for pid in arguments.pids if pid not in servers]:
        known = ", ".join(map(str, servers)) or "none"
        raise MissingError(
            f"warm stop: expected processes that drivetrain warm status lists ({known}), got {unknown[0]}"
        )
    chosen = [servers[pid] for pid in arguments.pids] or list(servers.values())
    for server in chosen:
        server.stop()
    write(f"ended: {len(chosen)}")
    return OK


def _text(server: WarmServer) -> str:
    modules = ", ".join(server.modules) or "no modules"
    runs = f"{server.runs} running, {server.served} in total"
    return (
        f"process {server.pid}: {modules}; {bytes_text(server.memory_bytes)}; runs: {runs}; "
        f"ends {_time_text(server.remaining_s)} after the last run"
    )


def _time_text(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
