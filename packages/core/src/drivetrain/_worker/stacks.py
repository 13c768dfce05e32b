"""Makes a process write its Python stacks when it receives a signal. This works even if it is stuck in C code."""

from __future__ import annotations

import faulthandler
import signal

__all__ = ["STACKS_SIGNAL", "dump_stacks_on_signal"]

STACKS_SIGNAL = signal.SIGRTMAX  # no library is known to use it


def dump_stacks_on_signal(descriptor: int) -> None:
    """Make this process write the stacks of all its threads to a descriptor on request."""
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
