"""How the Ray runtime records the exits of many workers at once. No cluster is started."""

import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drivetrain_ray import _group
from drivetrain_ray._actors import Actors
from drivetrain_ray._cluster import Reservation
from tests.groups import group_spec


def exits(count: int, reported: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, str], float, bool]:
    """Close all connections together; return the recorded reasons, the time that passed, and `reusable`."""
    reservation = SimpleNamespace(reusable=True)
    clock = SimpleNamespace(now=0.0)
    events: list[Any] = []
    with ExitStack() as resources:
        group = _group.RayGroup(
            group_spec(count, resources), 0.0, cast(Actors, SimpleNamespace()), cast(Reservation, reservation)
        )
        resources.callback(group._drains.close)
        resources.callback(group.close_connections)
        wait = group.handle_ready

        def pass_time(timeout_s: float | None) -> bool:
            """Let the time pass at once if no descriptor is readable."""
            assert timeout_s is not None
            if wait(0):
                return True
            clock.now += timeout_s
            if reported:
                for rank in range(count):
                    group.note_exit(rank, None, "was killed")
            return False

        monkeypatch.setattr(_group, "time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(group, "handle_ready", pass_time)
        for rank in range(count):
            ours, theirs = socket.socketpair()
            group.add_connection(rank, ours)
            theirs.close()
        group.pump(lambda event: events.append(event) is not None, 60)
    return {event.rank: event.reason for event in events}, clock.now, reservation.reusable


def test_hundreds_of_ranks_exit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons, _, reusable = exits(300, True, monkeypatch)
    assert reasons == dict.fromkeys(range(300), "was killed")
    assert reusable


def test_driver_waits_for_all_lost_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons, waited_s, reusable = exits(8, False, monkeypatch)
    assert reasons == dict.fromkeys(range(8), "closed its connection to the driver")
    assert waited_s == 4.0
    assert not reusable
