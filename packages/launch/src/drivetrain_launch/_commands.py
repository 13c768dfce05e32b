"""The running commands of a launch, and the process that terminates them if this process is killed."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from signal import Signals
from typing import TYPE_CHECKING

from drivetrain.plugin.processes import close_in_forked_children
from drivetrain_launch import _guard
from drivetrain_launch._launcher import Launcher

if TYPE_CHECKING:
    from drivetrain.plugin.callbacks import Console

__all__ = ["Commands"]

_EXIT_WAIT_S = 5.0
"""Seconds that the guard has to exit after the longest time that the termination of the commands can take."""


class Commands:
    """The running commands of a launch. They are numbered in the order in which they were started.

    Args:
        selector: calls the functions that handle the output and the exits of the commands.
        console: shows the output of the commands.
        files: files to delete if this process is killed.

    Attributes:
        exited: the numbers of the commands that have exited.
    """

    def __init__(self, selector: selectors.BaseSelector, console: Console, files: Sequence[str]) -> None:
        self.exited: set[int] = set()
        self._selector = selector
        self._console = console
        self._guard = _Guard(files)
        self._launchers: list[Launcher] = []

    def start(self, command: Sequence[str], name: str, environment: Mapping[str, str]) -> None:
        """Start a command.

        Args:
            command: the command line.
            name: the command line for messages.
            environment: the environment of the command.
        """
        number = len(self._launchers)
        launcher = Launcher(command, name, environment, self._console)
        self._guard.note_start(launcher.pid)
        launcher.run()
        self._launchers.append(launcher)
        self._selector.register(launcher.pidfd, selectors.EVENT_READ, lambda: self._on_exit(number))
        self._selector.register(launcher.output, selectors.EVENT_READ, lambda: self._on_output(launcher))

    @property
    def are_running(self) -> bool:
        """True if a command has not exited."""
        return len(self.exited) < len(self._launchers)

    def describe(self, number: int) -> str:
        """Return a command, its exit code if it has exited, and the last lines of its output, in one line."""
        return self._launchers[number].describe()

    def signal(self, number: Signals) -> None:
        """Send a signal to the process groups of all commands, also to what commands that have exited have left."""
        for launcher in self._launchers:
            launcher.send_signal(number)

    def close(self) -> None:
        """Release the commands. The guard terminates those that have not exited."""
        for launcher in self._launchers:
            launcher.close()
        self._guard.close()

    def _on_exit(self, number: int) -> None:
        launcher = self._launchers[number]
        self._selector.unregister(launcher.pidfd)
        self._guard.note_exit(launcher.pid)
        self.exited.add(number)

    def _on_output(self, launcher: Launcher) -> None:
        if not launcher.read():
            self._selector.unregister(launcher.output)


class _Guard:
    """A process that terminates the commands if this process is killed.

    Args:
        files: files that it deletes in this case.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _guard.__file__, str(os.getpid()), *files],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        close_in_forked_children(self._process.stdin)

    def note_start(self, group: int) -> None:
        """Note that a process group was started."""
        self._write(f"+{group}\n")

    def note_exit(self, group: int) -> None:
        """Note that a process group has exited."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """End the process. It first terminates the groups that have not exited, for example after a second Ctrl-C."""
        assert self._process.stdin is not None
        self._write(_guard.END)
        self._process.stdin.close()
        try:
            self._process.wait(_guard.MAX_DURATION_S + _EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), line.encode())
