"""The helpers for backends: free ports, temporary environment variables, and values of a process."""

import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from drivetrain.plugin.backends import ProcessValue, reserve_port, temporary_environment, worker_threads


def reserve_ports(count: int) -> list[int]:
    return [reserve_port() for _ in range(count)]


def test_two_processes_reserve_different_ports_that_the_kernel_gives_to_no_connection() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        ports = [port for found in pool.map(reserve_ports, [500, 500]) for port in found]

    assert len(set(ports)) == 1000
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first_ephemeral > 2_000:
        assert 1_024 <= min(ports) <= max(ports) < first_ephemeral


def test_variables_have_their_previous_values_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DT_TEST_OLD", "before")
    monkeypatch.delenv("DT_TEST_NEW", raising=False)

    def fail_in_block() -> None:
        with temporary_environment({"DT_TEST_OLD": "during", "DT_TEST_NEW": "new"}):
            assert (os.environ["DT_TEST_OLD"], os.environ["DT_TEST_NEW"]) == ("during", "new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_block()

    assert os.environ["DT_TEST_OLD"] == "before"
    assert "DT_TEST_NEW" not in os.environ


def test_copies_of_a_process_value_share_the_value_of_the_process() -> None:
    value = ProcessValue[list[int]]("tests.core.test_helpers")
    value.value = [1]
    copied = pickle.loads(pickle.dumps(value))

    assert copied.value is value.value
    copied.value = None
    assert value.value is None


@pytest.mark.parametrize(("set_to", "expected"), [("3", 3), ("4,2", 4), ("0", None), ("", None), ("many", None)])
def test_number_of_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch, set_to: str, expected: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", set_to)

    assert worker_threads() == expected
