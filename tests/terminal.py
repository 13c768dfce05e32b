"""Terminals for tests, with a screen as a person would see it."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyte
import pytest

from tests.support import DEADLINE_S, ROOT


class Terminal:
    """A pseudo-terminal, and a screen that shows its output."""

    def __init__(self, columns: int, rows: int) -> None:
        self._controller, self.device = pty.openpty()
        os.set_blocking(self._controller, False)
        fcntl.ioctl(self.device, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=1)
        self._stream = pyte.ByteStream(self.screen)

    def take(self, wait_s: float = 0.0) -> bool:
        """Show the pending output; return False once every writer has closed the terminal."""
        if not select.select([self._controller], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self._controller, 65536)
        except OSError:  # a terminal reports this when all writers have closed it
            return False
        self.show(data)
        return True

    def show(self, data: bytes) -> None:
        """Show text as if a program had written it."""
        self._stream.feed(data)

    def lines(self) -> list[str]:
        """Return the lines of the screen, without blank ones."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def close(self) -> None:
        os.close(self._controller)


@contextlib.contextmanager
def terminal(
    monkeypatch: pytest.MonkeyPatch, *, columns: int = 80, rows: int = 24
) -> Iterator[Callable[[], list[str]]]:
    """Make a terminal this process's standard error, and yield a function that returns the lines on its screen."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monitor = Terminal(columns, rows)

    def screen() -> list[str]:
        sys.stderr.flush()
        while select.select([monitor._controller], [], [], 0.05)[0]:
            monitor.take()
        return monitor.lines()

    try:
        with open(monitor.device, "w", buffering=1) as stream, contextlib.redirect_stderr(stream):
            yield screen
    finally:
        monitor.close()


def watch(
    script: Path,
    *,
    columns: int,
    rows: int = 30,
    environment: Mapping[str, str] | None = None,
    on_screen: Callable[[list[str]], None] = lambda lines: None,
) -> tuple[list[list[str]], list[str]]:
    """Run a script on a terminal, and call ``on_screen`` each time the screen has changed.

    Returns:
        The screen at each moment when it had changed, and at the end.
    """
    screen = Terminal(columns, rows)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    usual = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=script.parent,
        env={**usual, "TERM": "xterm-256color", "PYTHONPATH": paths, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=screen.device,
        stderr=screen.device,
        start_new_session=True,
    )
    os.close(screen.device)
    screens: list[list[str]] = []
    deadline = time.monotonic() + 2 * DEADLINE_S
    try:
        while screen.take(wait_s=0.5):
            assert time.monotonic() < deadline, screen.lines()
            if not screens or screen.lines() != screens[-1]:
                screens.append(screen.lines())
                on_screen(screens[-1])
        assert process.wait(DEADLINE_S) == 0, screen.lines()
    finally:
        process.kill()
        process.wait()
        screen.close()
    return screens, screen.lines()
