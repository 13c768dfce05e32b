"""LightGBM's network in a worker: its parameters, the check that they are used, and an exchange between the workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from drivetrain import ConfigurationError, SessionError
from drivetrain.plugin.backends import ProcessValue
from drivetrain_gbdt._parameters import find

__all__ = ["Peers", "check_connected", "network", "peers"]

_RETRY_S = 0.05


class Peers:
    """Exchanges bytes between all workers, over connections to rank 0 that a shared key authenticates.

    Args:
        rank: the rank of this worker.
        size: the number of workers.
        address: the host and port on which rank 0 listens. LightGBM uses the same port later.
        key: the key, which only the workers of the run know.
        timeout_s: timeout in seconds for connecting to rank 0.
    """

    def __init__(self, rank: int, size: int, address: tuple[str, int], key: bytes, timeout_s: float) -> None:
        self._rank = rank
        self._size = size
        self._address = address
        self._key = key
        self._timeout_s = timeout_s
        self._connections: dict[int, Connection[Any, Any]] = {}

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to rank 0 and, at the end, disconnect."""
        if self._rank:
            with self._connect() as connection:
                self._connections = {0: connection}
                yield
            return
        with contextlib.ExitStack() as stack:
            with Listener(self._address, backlog=self._size, authkey=self._key) as listener:
                self._connections = dict(self._accept(listener) for _ in range(self._size - 1))
            for connection in self._connections.values():
                stack.enter_context(connection)
            yield
            for connection in self._connections.values():  # the peers disconnect first, which frees the port at once
                with contextlib.suppress(EOFError, OSError):
                    connection.recv_bytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all workers, in the order of their ranks."""
        if self._rank:
            self._connections[0].send_bytes(data)
            return [self._connections[0].recv_bytes() for _ in range(self._size)]
        gathered = [data, *(self._connections[rank].recv_bytes() for rank in range(1, self._size))]
        for connection in self._connections.values():
            for part in gathered:
                connection.send_bytes(part)
        return gathered

    def _connect(self) -> Connection[Any, Any]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection = Client(self._address, authkey=self._key)
            except (OSError, EOFError) as error:  # rank 0 does not listen yet
                if time.monotonic() > deadline:
                    host, port = self._address
                    raise SessionError(
                        f"LightGBM: expected to reach rank 0 at {host}:{port} within {self._timeout_s:g} s, got "
                        f"{error}. Open this port to the other workers, or increase LightGBMConfig(timeout_s=...)"
                    ) from error
                time.sleep(_RETRY_S)
            else:
                connection.send_bytes(self._rank.to_bytes(8, "big"))
                return connection

    def _accept(self, listener: Listener) -> tuple[int, Connection[Any, Any]]:
        """Return the next peer's rank and connection. Other programs that connect have no key, and are ignored."""
        while True:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection = listener.accept()
                return int.from_bytes(connection.recv_bytes(8), "big"), connection


network = ProcessValue[dict[str, Any]]("drivetrain_gbdt.network")
"""The parameters that connect this worker to the others; None outside of a session."""

peers = ProcessValue[Peers]("drivetrain_gbdt.peers")
"""The other workers; None with one worker, and outside of a session."""


def check_connected(params: Mapping[str, Any]) -> None:
    """Check that a training uses the parameters that connect this worker to the others.

    Args:
        params: the parameters of the training.

    Raises:
        ConfigurationError: this worker would train a model of its own, on its own rows.
    """
    if "machines" not in (expected := network.value or {}):
        return
    wrong = [name for name in ("machines", "num_machines") if find(params, name) != expected[name]]
    if find(params, "tree_learner", "serial") == "serial":
        wrong.append("tree_learner")
    if wrong:
        values = ", ".join(f"{name}={find(params, name)!r}" for name in wrong)
        raise ConfigurationError(
            f"[DT-731] lightgbm.train: expected the parameters of get_network_params(), without which every worker "
            f"trains a model of its own, got {values}. Pass {{**params, **get_network_params()}}, in this order"
        )
