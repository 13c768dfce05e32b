"""A running command, and its output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain.plugin.processes import describe_exit
from drivetrain_launch._token import TOKEN_VARIABLE

if TYPE_CHECKING:
    from drivetrain.plugin.callbacks import Console

__all__ = ["Launcher"]

_READ_BYTES = 1 << 16
_KEPT_LINES = 20
_MAX_LINE = 1000
_WAIT_FOR_A_LINE = 'read -r _ && exec "$@" < /dev/null'
"""Executes its arguments, which the shell does not change, after a line on stdin; exits if stdin is closed before."""


class Launcher:
    """A command that starts one worker, or all of them. Its output is shown, and the last lines are kept for errors.

    The process waits for :meth:`run` before it executes the command.

    Args:
        command: the command line.
        name: the command line for messages.
        environment: the environment of the command.
        console: shows the output.

    Attributes:
        pidfd: a descriptor that becomes readable when the command exits.
        output: a descriptor from which the output can be read.
    """

    def __init__(self, command: Sequence[str], name: str, environment: Mapping[str, str], console: Console) -> None:
        self._console = console
        self._name = name
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""
        self._token = environment.get(TOKEN_VARIABLE, "")
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", _WAIT_FOR_A_LINE, "sh", *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # only the driver handles Ctrl-C in the terminal
            )
        finally:
            os.close(output)
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        """True if the command has exited. It is reaped later: until then, the id of its group cannot be reused."""
        poller = select.poll()  # select() does not accept descriptors from 1024 on
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def run(self) -> None:
        """Execute the command. Until then, the process exits if this process is killed or loses the object."""
        assert self._process.stdin is not None
        with self._process.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(b"\n")
            stdin.flush()

    def read(self) -> bool:
        """Show the available output. Return False if the output has ended."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, _READ_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > _MAX_LINE:
                    lines, self._rest = [*lines, self._rest], b""
                self._show(lines)
            return False
        return True

    def describe(self) -> str:
        """Return the command, its exit code if it has exited, and the last lines of its output, in one line."""
        self.read()
        lines = [*self._lines, *self._decode([self._rest] if self._rest else [])]
        how = describe_exit(self._exit_code()) if self.has_exited else "is running"
        output = f"its output ended with: {' | '.join(lines)}" if lines else "it printed nothing"
        return f"the command {self._name} {how}; {output}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the command."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Show the remaining output, reap the process, and close the descriptors."""
        self.read()
        self._show([self._rest] if self._rest else [])
        self._process.poll()
        os.close(self.pidfd)
        os.close(self.output)

    def _exit_code(self) -> int | None:
        try:
            exited = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code of the driver has reaped it
            return None
        if exited is None:
            return None
        return exited.si_status if exited.si_code == os.CLD_EXITED else -exited.si_status

    def _show(self, lines: Sequence[bytes]) -> None:
        if shown := self._decode(lines):
            self._lines.extend(shown)
            self._console.print("\n".join(shown), error=True)

    def _decode(self, lines: Sequence[bytes]) -> list[str]:
        """Return lines as text, without the token, which a launcher that prints its environment would show."""
        decoded = [line.decode(errors="replace").rstrip() for line in lines]
        return [(line.replace(self._token, "***") if self._token else line)[:_MAX_LINE] for line in decoded]
