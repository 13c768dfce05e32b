"""The socket on which a driver answers other processes of its user."""

import contextlib
import resource
import secrets
import socket
import threading

import pytest

from drivetrain._driver.control import _address, ask, listen


def test_driver_answers_again_once_it_has_a_free_descriptor() -> None:
    run_id = secrets.token_hex(4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        listen(run_id, lambda question: f"answer to {question}"),
        socket.socket(socket.AF_UNIX) as first,
        socket.socket(socket.AF_UNIX) as second,
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            for client in (first, second):
                client.settimeout(0.5)
                client.connect(_address(run_id))
                client.sendall(b"1")
            with contextlib.suppress(TimeoutError):  # a thread that waits in accept() already has a descriptor for one
                first.recv(100)
            with pytest.raises(TimeoutError):
                second.recv(100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        second.settimeout(10)
        assert second.recv(100) == b"answer to 1"
        assert ask(run_id, "2") == "answer to 2"


@pytest.mark.parametrize("beginning", [b"", b"the beginning of a reply"])
def test_driver_that_ends_before_its_reply_counts_as_no_driver(beginning: bytes) -> None:
    run_id = secrets.token_hex(4)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_address(run_id))
        listener.listen()

        def end_without_reading() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(beginning)
                connection.recv(1)  # the rest of the request is never read, so the client gets an error

        thread = threading.Thread(target=end_without_reading)
        thread.start()
        assert ask(run_id, "stacks") is None
        thread.join()
