"""``drivetrain warm``: starts, lists and stops warm servers, from which the next run of a script starts at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from drivetrain import ConfigurationError
from drivetrain.plugin.warm import KEEP_WARM, WarmServer, seconds_of, warm_servers
from drivetrain_console._commands.output import BAD, OK, Commands, MissingError, add_json, emit, write
from drivetrain_console._views.terminal import bytes_text

__all__ = ["add_keep_warm", "add_warm"]

_DEFAULT_S = 600.0
_EXPLANATION = """\
A warm server is a process that has made the imports at the top of a script, and from which the next run of the script
starts at once. It keeps installed packages whose imports precede every other statement, and serves runs from the same
directory with the same environment. It ends when it was not used for a time.
"""
_EXAMPLES = """\
examples:
  drivetrain warm start train.py     make the imports, and keep them
  drivetrain run train.py     starts at once
  drivetrain run --keep-warm 10m train.py     starts at once if there is a server, and otherwise keeps one
  drivetrain warm status train.py     list the servers; would train.py be served from here, and if not, why?
  drivetrain warm stop     end all of them
"""


def add_keep_warm(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--keep-warm`` of ``run``."""
    parser.add_argument(
        "--keep-warm",
        type=_seconds,
        default=_default(),
        metavar="TIME",
        help="for a script that runs once: keep a warm server for this time after the run, such as 10m, from which the "
        "next run starts at once. With 0, no server is used. The default is DRIVETRAIN_KEEP_WARM; without it, a server "
        "that exists is used, but none is started. See drivetrain warm --help",
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
    parser = commands.add_parser(
        "warm",
        help="keep the imports of a script in a warm server, from which its next run starts at once",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(usage_of=parser)
    actions = parser.add_subparsers(metavar="ACTION")

    summary = "start a warm server for a script"
    start = actions.add_parser("start", help=summary, description=f"{summary.capitalize()}, without running it.")
    start.add_argument("script", help="the script")
    start.add_argument(
        "--keep-warm",
        type=_seconds,
        default=_default() or _DEFAULT_S,
        metavar="TIME",
        help="how long the server is kept after the last run, such as 2h (default: DRIVETRAIN_KEEP_WARM, or 10m)",
    )
    start.set_defaults(handler=_start)

    summary = "list the warm servers"
    status = actions.add_parser("status", help=summary, description=f"{summary.capitalize()} of this user.")
    status.add_argument("script", nargs="?", help="a script: say if a run from here would be served, or why not")
    status.set_defaults(handler=_status)
    add_json(status)

    summary = "end warm servers, after their runs if there are any"
    stop = actions.add_parser("stop", help=summary, description=f"{summary.capitalize()}.")
    stop.add_argument(
        "which", nargs="*", metavar="SCRIPT|PID", help="the servers for scripts in this environment, or with these pids"
    )
    stop.set_defaults(handler=_stop)


def _require_script(command: str, script: str) -> None:
    if not Path(script).is_file():
        raise ConfigurationError(f"warm {command}: expected a script that exists, got the missing file {script}")


def _start(arguments: argparse.Namespace) -> int:
    _require_script("start", arguments.script)
    if arguments.keep_warm == 0:
        raise ConfigurationError("warm start --keep-warm: expected a time above 0, got 0")
    arguments.finally_run = partial(_start_here, arguments.script, arguments.keep_warm)
    return OK


def _start_here(script: str, keep_s: float) -> int:
    from drivetrain.plugin.drivers import explain_imports, start_warm_server

    server = start_warm_server(script, keep_s)
    if server is None:
        write(
            "drivetrain: warm start: expected imports that can be kept, but one of them has started a thread, opened "
            "an accelerator, set a handler of a signal, or has no installed file; or the environment prevents it (Ray, "
            "a debugger, or DRIVETRAIN_EARLY_FORK=0). The script can be run as always",
            error=True,
        )
        return BAD
    write(_text(server))
    for sentence in explain_imports(script):
        write(f"note: {sentence}")
    return OK


def _status(arguments: argparse.Namespace) -> int:
    servers = warm_servers()
    names = ("pid", "modules", "directory", "runs", "served", "remaining_s", "memory_bytes")
    data = [{name: getattr(server, name) for name in names} for server in servers]
    lines = list(map(_text, servers)) or ["there is no warm server"]
    if arguments.script is not None:
        _require_script("status", arguments.script)
        for server, facts in zip(servers, data, strict=True):
            facts["differences"] = server.differences(arguments.script)
            lines.append(_verdict(arguments.script, server.pid, facts["differences"]))
    emit(arguments, data, lambda: "\n".join(lines))
    return OK


def _verdict(script: str, pid: int, differences: list[str]) -> str:
    if not differences:
        return f"{script} would be served by process {pid}"
    return f"{script} would not be served by process {pid}, because these differ: {', '.join(differences)}"


def _stop(arguments: argparse.Namespace) -> int:
    servers = warm_servers()
    chosen = [server for which in arguments.which for server in _find(which, servers)] if arguments.which else servers
    for server in chosen:
        server.stop()
        write(f"process {server.pid} ends {'after its runs' if server.runs else 'now'}")
    if not chosen:
        write("there is no warm server")
    return OK


def _find(which: str, servers: Sequence[WarmServer]) -> list[WarmServer]:
    """Return the servers with a pid, or for a script.

    Raises:
        MissingError: there is none.
    """
    if which.isdigit():
        found = [server for server in servers if server.pid == int(which)]
    else:
        _require_script("stop", which)
        found = [server for server in servers if not server.differences(which)]
    if not found:
        known = ", ".join(str(server.pid) for server in servers) or "none"
        raise MissingError(f"warm stop: expected a server that drivetrain warm status lists ({known}), got {which}")
    return found


def _text(server: WarmServer) -> str:
    modules = ", ".join(server.modules) or "no modules"
    remaining = f"{server.remaining_s / 60:.0f} min" if server.remaining_s >= 90 else f"{server.remaining_s:.0f} s"
    ends = f"ends {remaining} after the last run" if server.runs else f"ends in {remaining}"
    return (
        f"process {server.pid}, for {server.directory}: {modules}; {bytes_text(server.memory_bytes)}; "
        f"runs: {server.runs} now, {server.served} in total; {ends}"
    )
