"""Asks running processes for their Python stacks, by a signal that even one stuck in C code answers."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NO_ANSWER", "answer_to_signal", "collect_stacks", "own_stacks", "read_stacks"]

NO_ANSWER = "  no answer"
"""How the text begins that stands for the stacks of a process which does not tell them."""

_SIGNAL = signal.SIGRTMAX  # one that neither users nor libraries are known to use
_WAIT_S = 1.0
_QUIET_S = 0.2
_STATES = {
    **{"T": "is stopped (SIGSTOP)", "t": "is held by a debugger", "D": "waits in the kernel, for a disk or a network"},
    **{"Z": "has ended", "X": "has ended"},
}


def answer_to_signal(descriptor: int) -> None:
    """Makes this process write the stacks of all its threads to a descriptor when it is asked to."""
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)


def own_stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace").rstrip()


def collect_stacks(targets: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Asks processes for their stacks, and waits a second at most for the answers.

    Args:
        targets: by rank, the process id and a descriptor to read its answer from.

    Returns:
        The stacks of each rank, or why it did not answer.
    """
    answers = dict.fromkeys(targets, b"")
    with selectors.DefaultSelector() as selector:
        for rank, (pid, descriptor) in targets.items():
            selector.register(descriptor, selectors.EVENT_READ, rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _WAIT_S
        while (remaining := deadline - time.monotonic()) > 0:
            ready = selector.select(min(_QUIET_S, remaining))
            if not ready and all(answers.values()):
                break
            for key, _ in ready:
                answers[key.data] += os.read(key.fd, 1 << 16)
    found = {rank: text.decode(errors="replace").rstrip() for rank, text in answers.items()}
    return {rank: found[rank] or _why_silent(pid) for rank, (pid, _) in targets.items()}


def read_stacks(targets: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Reads the stacks of worker processes on this node that called :func:`~drivetrain.plugin.worker_main`.

    Args:
        targets: by rank, the process id and the descriptor in that process; see
            :meth:`~drivetrain.plugin.RemoteGroup.stack_targets`.

    Returns:
        The stacks of each rank, or why it did not answer. Ranks whose process has exited are left out.
    """
    with contextlib.ExitStack() as opened:
        ours: dict[int, tuple[int, int]] = {}
        for rank, (pid, descriptor) in targets.items():
            with contextlib.suppress(OSError):
                pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
                opened.callback(os.close, pipe)
                ours[rank] = (pid, pipe)
        return collect_stacks(ours)


def _why_silent(pid: int) -> str:
    """Why a process has not answered, from its state."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return f"{NO_ANSWER}: the process is gone"
    return f"{NO_ANSWER}: process {pid} {_STATES.get(state, 'is busy')}"
