"""Terminates the commands of a run if the driver is killed. A script that needs only the standard library.

A command whose workers are connected ends when they exit, but one that still waits for free nodes would wait on. The
guard also terminates commands that the driver loses track of, for example because of Ctrl-C at an unfortunate moment.

The arguments are the process id of the driver, and the files to delete. Each line of stdin is ``+`` or ``-`` and the id
of a process group: one that has been started, or one that has exited. The line :data:`END` is the last one.
"""

import contextlib
import os
import select
import signal
import sys
import time

END = "end\n"
"""The last line of a driver that has not been killed. A process that the driver has forked may keep the pipe open."""

_GRACE_S = 10.0
_KILL_WAIT_S = 5.0
MAX_DURATION_S = _GRACE_S + _KILL_WAIT_S
"""The longest time in seconds that the guard needs to terminate the groups."""

_CHECK_S = 0.05


def main(driver: int, *files: str) -> None:
    """Wait until the driver has exited, and terminate the process groups that are left."""
    lines = _read_until_exit(driver)
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
    groups = [int(line[1:]) for line in lines if line.startswith(b"+") and b"-" + line[1:] not in lines]
    for number, seconds in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _KILL_WAIT_S)):
        groups = [group for group in groups if _send(group, number)]
        deadline = time.monotonic() + seconds
        while groups and time.monotonic() < deadline:
            time.sleep(_CHECK_S)
            groups = [group for group in groups if _send(group, 0)]


def _read_until_exit(driver: int) -> list[bytes]:
    """Return the lines of stdin until the driver exits, closes the pipe, or writes the last line."""
    data = b""
    with contextlib.suppress(ProcessLookupError):
        exited = os.pidfd_open(driver)
        while not data.endswith(END.encode()) and exited not in select.select([0, exited], [], [])[0]:
            part = os.read(0, 4096)
            if not part:
                break
            data += part
    os.set_blocking(0, False)
    with contextlib.suppress(BlockingIOError):
        while part := os.read(0, 4096):
            data += part
    return data.splitlines()


def _send(group: int, number: int) -> bool:
    """Send a signal to a process group; 0 to send none. Return False if the group does not exist any more."""
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
