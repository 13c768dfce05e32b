import contextlib
import select
import signal
import socket
from collections.abc import Iterator

import pytest

from drivetrain._base.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    with contextlib.closing(Interrupts()) as made:
        yield made


@pytest.fixture
def event_loop_socket() -> Iterator[socket.socket]:
    """The reading end of a socket to which Python writes signals, as an asyncio event loop has one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(before)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals received by a handler of other code."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGUSR1, before)


def is_readable(source: Interrupts | socket.socket, timeout_s: float) -> bool:
    return bool(select.select([source], [], [], timeout_s)[0])


def test_every_signal_makes_the_descriptor_readable_even_if_it_does_not_end_the_run(
    interrupts: Interrupts, handled: list[int]
) -> None:
    with interrupts.from_signals():
        signal.raise_signal(signal.SIGUSR1)
        assert handled == [signal.SIGUSR1]
        assert is_readable(interrupts, 0)
        interrupts.act()
        assert not is_readable(interrupts, 0)

    signal.raise_signal(signal.SIGUSR1)
    assert not is_readable(interrupts, 0)


def test_final_request_is_noticed_by_all_threads_that_wait_for_it(interrupts: Interrupts) -> None:
    interrupts.request("cancelled", KeyboardInterrupt())
    for _ in range(2):
        assert is_readable(interrupts, 0)
        with pytest.raises(KeyboardInterrupt):
            interrupts.act()


def test_signals_are_forwarded_to_the_wakeup_descriptor_of_other_code(
    interrupts: Interrupts, event_loop_socket: socket.socket, handled: list[int]
) -> None:
    with interrupts.from_signals():
        signal.raise_signal(signal.SIGUSR1)
        interrupts.request("for a test", RuntimeError())  # writes to the same socket
        assert not is_readable(event_loop_socket, 0)
        with pytest.raises(RuntimeError):
            interrupts.act()
        assert event_loop_socket.recv(100) == bytes((signal.SIGUSR1,))
        signal.raise_signal(signal.SIGUSR1)

    assert event_loop_socket.recv(100) == bytes((signal.SIGUSR1,))
    assert handled == [signal.SIGUSR1] * 2
    signal.raise_signal(signal.SIGUSR1)
    assert event_loop_socket.recv(100) == bytes((signal.SIGUSR1,)), "the descriptor was not restored"
