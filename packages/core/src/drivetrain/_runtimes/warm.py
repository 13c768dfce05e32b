"""Runs a script in a driver that is forked from a warm server, which has made the imports of the script.

A warm server is a process that remains after a run, for a time that the user sets: see
:mod:`drivetrain._runtimes.warmserver`. This module has the side of its clients. It imports little, because all of it
is part of the time until the script starts.

Server and client find each other by an abstract Unix socket. Its name contains the user and a digest of everything on
which the imports of the script and the start of a driver depend, so a client in any other situation finds no server.
Each side checks the user of the other. Requests and replies are lines of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from drivetrain._base.head import head_imports
from drivetrain._base.inherited import inherited_settings
from drivetrain._base.interpreter import as_main_script, interpreter_options
from drivetrain._base.peers import peer_uid
from drivetrain._base.wakeup import Wakeup
from drivetrain._version import __version__

__all__ = [
    "ACCEPTED",
    "INHERITED",
    "KEEP_WARM",
    "PASSED",
    "WarmServer",
    "abstract_name",
    "digest_of",
    "find_warm_server",
    "receive_line",
    "run_in_warm_server",
    "seconds_of",
    "warm_facts",
    "warm_servers",
]

KEEP_WARM = "DRIVETRAIN_KEEP_WARM"
"""The environment variable with the time for which a warm server is kept."""

PASSED = (
    *("_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES", KEEP_WARM),
    *("TMUX_PANE", "STY", "WINDOW", "WINDOWID", "GPG_TTY", "SSH_TTY", "SSH_CLIENT", "SSH_CONNECTION"),
    *("TERM_SESSION_ID", "ITERM_SESSION_ID", "KITTY_WINDOW_ID", "WEZTERM_PANE"),
)
"""Environment variables that differ from command to command, and between terminals. The driver gets the client's."""

INHERITED = "limits, priority, rights, signals or groups"
"""The fact with the settings of the system. The server checks those of each client."""

ACCEPTED = b"accepted"
"""The reply to a request for a driver. The client then sends its descriptors."""

_OF_GROUP = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH}
"""Signals of the terminal, which it sends to all processes of a group."""

_NOT_FORWARDED = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
}

_MAX_LINE_BYTES = 4 << 20
_MAX_DESCRIPTORS = 253  # of the kernel
_WAIT_S = 5.0
_ACCEPT_S = 2.0
_STATUS_S = 1.0
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """Return a time such as ``90``, ``30s``, ``10m`` or ``2h`` in seconds.

    Raises:
        ValueError: the text is something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise ValueError(f"expected a time such as 90, 30s, 10m or 2h, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def warm_facts(path: str) -> dict[str, object]:
    """Return all that the imports of a script and the start of its driver depend on. JSON can represent it.

    Args:
        path: the path of the script.

    Raises:
        OSError: the script cannot be read, or this is not Linux.
    """
    with open(path, "rb") as file, as_main_script(path):
        head = head_imports(file.read(), path)
    variables = {name: hashlib.sha256(os.fsencode(value)).hexdigest() for name, value in os.environ.items()}
    return {
        "interpreter": [sys.executable, sys.version, interpreter_options(), list(sys.flags), __version__],
        "kind of standard stream": [*map(_kind_of_stream, range(3)), getattr(sys.stdout, "write_through", None)],
        "directory of the script": os.path.dirname(os.path.realpath(path)),
        "working directory": os.getcwd(),
        "module path": sys.path[1:],
        "list of imports": [list(each.modules) for each in head],
        "environment": {name: digest for name, digest in sorted(variables.items()) if name not in PASSED},
        INHERITED: inherited_settings(),
    }


def _kind_of_stream(descriptor: int) -> list[object]:
    """Return what a stream of Python remembers of its file, and what packages ask when they are imported."""
    return [stat.S_IFMT(os.fstat(descriptor).st_mode), os.isatty(descriptor)]


def digest_of(facts: Mapping[str, object]) -> str:
    """Return the digest of facts that is part of the name of a server."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def abstract_name(digest: str) -> str:
    """Return the name of the socket of the server with this digest."""
    return f"drivetrain-warm-{os.getuid()}-{digest}"


def run_in_warm_server(path: str, arguments: Sequence[str], keep_s: float | None) -> int | None:
    """Run a script in a driver that a warm server forks. Return None if there is no server for it.

    While the driver runs, this process forwards signals to it. The driver is killed if this process dies.

    Args:
        path: the path of the script.
        arguments: its arguments.
        keep_s: the time in seconds for which the server is kept after the run; None for the time as before.

    Returns:
        The exit code of the driver. If a signal has killed the driver, this process kills itself with it.
    """
    if not _names() or _is_traced() or None in (sys.stdin, sys.stdout, sys.stderr) or _is_in_background():
        return None
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(_connected(abstract_name(digest_of(warm_facts(path)))))
            start = _request_driver(connection, path, arguments, keep_s)
            stack.callback(os.close, start)
            pid = int(json.loads(receive_line(connection)[0])["pid"])
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it has refused
            return None
        connection.settimeout(None)
        wakeup = stack.enter_context(_forwarding(pid))
        with contextlib.suppress(OSError):  # it has died
            os.write(start, b"1")
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        poller.register(wakeup, select.POLLIN)
        while connection.fileno() not in dict(poller.poll()):
            wakeup.drain()
        status = int(receive_line(connection)[0] or -signal.SIGKILL)
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _is_traced() -> bool:
    """Return True if a debugger or a program such as strace follows this process, and would not see the script."""
    with open("/proc/self/status") as file:
        return sys.gettrace() is not None or "TracerPid:\t0\n" not in file.read()


def _is_in_background() -> bool:
    """Return True if this is a background job of a shell, whose driver the terminal could not stop."""
    for descriptor in range(3):
        with contextlib.suppress(OSError):  # it is no terminal, or not the one of this process
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return True
    return False


def _inherited_descriptors() -> list[int]:
    """Return the descriptors that this process has from the process that started it."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one of the directory itself
            if os.get_inheritable(descriptor):
                found.append(descriptor)
    return sorted(found)


def _request_driver(connection: socket.socket, path: str, arguments: Sequence[str], keep_s: float | None) -> int:
    """Request a driver, and return the descriptor to which this process writes when the driver shall start."""
    os.umask(umask := os.umask(0o077))
    descriptors = _inherited_descriptors()
    request = {
        "command": "run",
        "path": path,
        "arguments": list(arguments),
        "working_directory": os.getcwd(),
        "umask": umask,
        "variables": {name: os.environ[name] for name in PASSED if name in os.environ},
        "keep_s": keep_s,
        "descriptors": descriptors,
        "original_arguments": sys.orig_argv,
    }
    connection.settimeout(_ACCEPT_S)
    connection.sendall(json.dumps(request).encode() + b"\n")
    if receive_line(connection)[0] != ACCEPTED:  # a server that does not reply must not have the files
        raise OSError("the server has refused")
    connection.settimeout(_WAIT_S)
    theirs, ours = os.pipe()
    try:
        socket.send_fds(connection, [b"\n"], [theirs, *descriptors])
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return ours


class WarmServer:
    """A running warm server of this user.

    Args:
        name: the name of its socket.
        facts: its reply to a request for its status.

    Attributes:
        pid: its process id.
        modules: the modules that it has imported for the heads of scripts.
        facts: what it requires of its clients: see :func:`warm_facts`.
        directory: the directory of the scripts that it serves.
        runs: the number of drivers that are running.
        served: the number of drivers that it has forked, the running ones included.
        remaining_s: the time in seconds until it ends if there is no other run, from now or from the end of the runs.
        memory_bytes: its resident memory, most of which its drivers and their workers share.
    """

    def __init__(self, name: str, facts: Any) -> None:
        self._name = name
        self.pid = int(facts["pid"])
        self.modules = tuple(dict.fromkeys(map(str, facts["modules"])))
        self.facts = dict(facts["facts"])
        self.directory = str(self.facts["directory of the script"])
        self.runs = int(facts["runs"])
        self.served = int(facts["served"])
        self.remaining_s = float(facts["remaining_s"])
        self.memory_bytes = int(facts["memory_bytes"])

    def differences(self, path: str) -> list[str]:
        """Return the facts by which a run of a script from this process differs from those that the server serves.

        Args:
            path: the path of the script.

        Raises:
            OSError: the script cannot be read.
        """
        facts = warm_facts(path)
        found = [name for name in facts if name != "environment" and facts[name] != self.facts.get(name)]
        ours, theirs = facts["environment"], self.facts["environment"]
        assert isinstance(ours, dict)
        variables = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        return [*found, *(f"environment variable {name}" for name in variables)]

    def stop(self) -> None:
        """End the server, after its runs if there are any."""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            _ask(self._name, "stop")


def warm_servers() -> list[WarmServer]:
    """Return the warm servers of this user on this machine."""
    found = []
    for name in _names():
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is about to end
            found.append(WarmServer(name, _ask(name, "status")))
    return found


def find_warm_server(digest: str, *, limit_s: float) -> WarmServer | None:
    """Return the warm server with a digest; None if there is none, or if it does not respond in time.

    Args:
        digest: the digest of its facts.
        limit_s: the time limit in seconds.
    """
    name = abstract_name(digest)
    try:
        return WarmServer(name, _ask(name, "status", limit_s))
    except (OSError, ValueError, KeyError):
        return None


def _names() -> list[str]:
    """Return the names of the sockets of this user's servers."""
    try:
        with open("/proc/net/unix", errors="replace") as file:
            text = file.read()
    except OSError:
        return []
    prefix = "@" + abstract_name("")
    return sorted({line.rpartition("@")[2] for line in text.split("\n") if prefix in line})


def _ask(name: str, command: str, limit_s: float = _STATUS_S) -> Any:
    with _connected(name) as connection:
        connection.settimeout(limit_s)
        connection.sendall(json.dumps({"command": command}).encode() + b"\n")
        return json.loads(receive_line(connection)[0])


@contextlib.contextmanager
def _connected(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_WAIT_S)
        connection.connect(f"\0{name}")
        if peer_uid(connection) != os.getuid():
            raise OSError("the server belongs to another user")
        yield connection


@contextlib.contextmanager
def _forwarding(pid: int) -> Iterator[Wakeup]:
    """Forward signals to a driver, which is the leader of its process group.

    Yields:
        What each signal wakes. Wait for it while you wait for the driver: a signal that arrives just before a system
        call does not interrupt the call, and Python calls no handler until the call returns.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if number in _OF_GROUP else os.kill)(pid, number)

    def stop(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when this process continues
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)

    handlers: dict[int, Any] = dict.fromkeys(signal.valid_signals() - _NOT_FORWARDED, forward)
    handlers[signal.SIGTSTP] = stop
    ignored = [number for number in handlers if signal.getsignal(number) is signal.SIG_IGN]
    with contextlib.closing(Wakeup()) as wakeup:
        earlier = wakeup.receive_signals()
        before = {number: signal.signal(number, handlers[number]) for number in handlers if number not in ignored}
        try:
            yield wakeup
        finally:
            for number, handler in before.items():
                if handler is not None:  # otherwise, it is not one of Python
                    signal.signal(number, handler)
            signal.set_wakeup_fd(earlier)


def receive_line(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a line, and the descriptors that come with it. The line is empty if the other end has closed."""
    data, descriptors = b"", []
    while not data.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(connection, 1 << 16, _MAX_DESCRIPTORS)
        descriptors += more
        data += part
        if not part or len(data) > _MAX_LINE_BYTES:
            for descriptor in descriptors:
                os.close(descriptor)
            return b"", []
    return data[:-1], descriptors
