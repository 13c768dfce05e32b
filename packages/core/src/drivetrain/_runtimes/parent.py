"""The parent of worker processes: it forks them, waits for them, and kills everything that they leave."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from drivetrain._base.wakeup import Wakeup
from drivetrain._runtimes.processes import (
    adopt_orphans,
    await_exit,
    children,
    die_with_parent,
    fork_process,
    kill_group,
)
from drivetrain._worker.output import flush_output

__all__ = ["ProcessParent"]

_ORPHANS_EXIT_S = 5.0


class ProcessParent:
    """Forks worker processes from this process, which must have one thread.

    Each worker is the leader of a process group. When it exits, its group is killed. A process that left the group
    becomes a child of this process when its parent exits; these children are killed as soon as no worker is left. If
    this process dies, the kernel kills the workers.

    Args:
        on_exit: called with the pid and the exit code of each worker that has exited.
        signals: the signals to be notified of; this process ignores them otherwise.

    Attributes:
        workers: the pids of the running workers.
    """

    def __init__(
        self, on_exit: Callable[[int, int], None], signals: Sequence[signal.Signals] = (signal.SIGCHLD,)
    ) -> None:
        self.workers: set[int] = set()
        self._on_exit = on_exit
        self._signals = signals
        self._own_children: set[int] = set()  # children that are neither workers nor started by workers
        self._wakeup = Wakeup()

    def begin(self) -> None:
        """Adopt the descendants of this process, and receive signals."""
        adopt_orphans()
        self._own_children = children()  # such as the resource tracker of multiprocessing
        for number in self._signals:
            signal.signal(number, lambda *_: None)  # without a handler, nothing is written to the wakeup descriptor
        self._wakeup.receive_signals()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a child exits or a signal arrives."""
        return self._wakeup.fileno()

    def handle(self) -> bytes:
        """Reap the children that have exited. Return the numbers of the signals that have arrived."""
        numbers = self._wakeup.drain()
        self._reap()
        return numbers

    def fork_worker(self, run: Callable[[], object]) -> int:
        """Fork a worker.

        Args:
            run: called in the worker, which exits with the code 0 when it returns, and with 1 if it raises.

        Returns:
            The pid of the worker.
        """
        parent = os.getpid()
        pid = fork_process()
        if pid == 0:
            self._become_worker(parent, run)
        self.workers.add(pid)
        return pid

    def close(self) -> None:
        """Kill the workers, and everything that they have started."""
        for pid in self.workers:
            kill_group(pid, signal.SIGKILL)
        for pid in self.workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.workers.clear()
        self._kill_orphans()

    def _become_worker(self, parent: int, run: Callable[[], object]) -> NoReturn:
        status = 1
        try:
            os.setsid()  # its own process group, so that it can be killed together with its children
            die_with_parent(parent)
            self._leave_to_child()
            for number in self._signals:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.enable()
            run()
            status = 0
        except BaseException:  # a worker must not return to the parent's loop
            sys.excepthook(*sys.exc_info())
        finally:
            flush_output()
            os._exit(status)

    def _leave_to_child(self) -> None:
        signal.set_wakeup_fd(-1)
        self._wakeup.close()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children
            # A worker is reaped after its group was killed: until then, the id of the group cannot be reused.
            while (exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                is_worker = exited.si_pid in self.workers
                if is_worker:
                    kill_group(exited.si_pid, signal.SIGKILL)
                _, status = os.waitpid(exited.si_pid, 0)
                if is_worker:
                    self.workers.remove(exited.si_pid)
                    self._kill_orphans()
                    self._on_exit(exited.si_pid, os.waitstatus_to_exitcode(status))

    def _kill_orphans(self) -> None:
        """Kill the processes that the workers have left, and their children, once no worker is left.

        Until then, a child of this process may belong to any of the workers.
        """
        deadline = time.monotonic() + _ORPHANS_EXIT_S
        while not self.workers and (left := children() - self._own_children) and time.monotonic() < deadline:
            for pid in left:
                kill_group(pid, signal.SIGKILL)
            for pid in left:
                await_exit(pid, deadline)
