"""Requests the Python stacks of worker processes on this node, with a signal, and returns those of this process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from drivetrain._worker.stacks import STACKS_SIGNAL

__all__ = ["NO_RESPONSE", "collect_stacks", "own_stacks", "read_stacks"]

NO_RESPONSE = "  no response"
"""The start of the text that is shown instead of the stacks if a process does not respond."""

_WAIT_S = 5.0
_QUIET_S = 0.5
_STATES = {
    **{"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "waits in the kernel for disk or network"},
    **{"Z": "has exited", "X": "has exited"},
}
_UNRESPONSIVE = frozenset("TtZX")  # a process usually waits in the kernel for a short time only


def own_stacks() -> str:
    """Return the stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace").rstrip()


def collect_stacks(targets: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Request the stacks of processes, and read the responses until they are complete.

    A response is considered complete if nothing follows for half a second. The call waits at most about five seconds.
    It does not wait for processes that are stopped or have exited.

    Args:
        targets: for each rank, the process id and a descriptor from which the response of the process can be read.

    Returns:
        For each rank, the stacks, or the reason why the process did not respond.
    """
    responses = dict.fromkeys(targets, b"")
    with selectors.DefaultSelector() as selector:
        for rank, (pid, descriptor) in targets.items():
            selector.register(descriptor, selectors.EVENT_READ, rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _WAIT_S
        is_last = False
        while not is_last:
            is_last = time.monotonic() >= deadline
            ready = selector.select(_QUIET_S)
            for key, _ in ready:
                if data := os.read(key.fd, 1 << 16):
                    responses[key.data] += data
                else:  # the process has exited
                    selector.unregister(key.fd)
            silent = [pid for rank, (pid, _) in targets.items() if not responses[rank]]
            is_last = is_last or (not ready and all(_state(pid) in _UNRESPONSIVE for pid in silent))
    stacks = {rank: text.decode(errors="replace").rstrip() for rank, text in responses.items()}
    return {rank: stacks[rank] or _explain_silence(pid) for rank, (pid, _) in targets.items()}


def read_stacks(targets: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Return the stacks of worker processes on this node, which run :func:`~drivetrain.plugin.runtimes.worker_main`.

    Args:
        targets: for each rank, the process id and a descriptor number in that process, as
            :meth:`~drivetrain.plugin.RemoteGroup.stack_targets` returns them.

    Returns:
        For each rank, the stacks, or the reason why the process did not respond. Ranks whose process has exited are
        left out.
    """
    with contextlib.ExitStack() as opened:
        ours: dict[int, tuple[int, int]] = {}
        for rank, (pid, descriptor) in targets.items():
            with contextlib.suppress(OSError):
                pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
                opened.callback(os.close, pipe)
                ours[rank] = (pid, pipe)
        return collect_stacks(ours)


def _explain_silence(pid: int) -> str:
    """Return why a process did not respond, derived from its state."""
    return f"{NO_RESPONSE}: process {pid} {_STATES.get(_state(pid), 'is busy')}"


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"
