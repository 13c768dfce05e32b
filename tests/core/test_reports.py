import random

import pytest

from drivetrain._driver.reports import ReportMatcher, combine
from drivetrain._wire.events import Reported


def report(rank: int, number: int, *, combine: bool = False, **metrics: float) -> Reported:
    return Reported(rank, number, number, 0.0, metrics, None, {"loss": "mean"} if combine else None)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_report_without_combination_waits_for_no_other_rank() -> None:
    matcher = ReportMatcher(2)

    assert matcher.add(report(0, 1)) == matcher.add(report(0, 2)) == []
    assert not matcher.waits_up_to(2)


def test_combination_is_complete_when_every_rank_has_passed_its_report() -> None:
    matcher = ReportMatcher(3)

    assert matcher.add(report(0, 1, combine=True, loss=1)) == []
    assert matcher.add(report(1, 1, loss=2)) == []
    assert matcher.waits_up_to(1)
    (matched,) = matcher.add(report(2, 1, combine=True, loss=3))

    assert (matched.number, matched.metrics) == (1, {0: {"loss": 1}, 1: {"loss": 2}, 2: {"loss": 3}})
    assert not matcher.waits_up_to(1)


def test_waiting_reports_are_released_in_order() -> None:
    matcher = ReportMatcher(2)
    for number in (1, 2, 3):
        assert matcher.add(report(0, number, combine=True)) == []

    assert [matched.number for matched in matcher.add(report(1, 1))] == [1]
    assert [matched.number for matched in matcher.finish(1)] == [2, 3]


def test_rank_that_finishes_is_not_waited_for() -> None:
    matcher = ReportMatcher(2)
    assert matcher.finish(1) == []

    assert [matched.number for matched in matcher.add(report(0, 1, combine=True))] == [1]


def test_rank_that_never_reports_is_not_waited_for_after_many_reports_of_others() -> None:
    clock = Clock()
    matcher = ReportMatcher(2, clock=clock)
    assert matcher.add(report(0, 1, combine=True)) == []
    clock.seconds = 60.0
    assert matcher.add(report(0, 2)) == []

    assert [matched.number for matched in matcher.add(report(0, 3))] == [1]
    assert [matched.number for matched in matcher.add(report(0, 4, combine=True))] == [4]


def test_silent_rank_is_waited_for_again_once_it_reports() -> None:
    clock = Clock()
    matcher = ReportMatcher(2, clock=clock)
    matcher.add(report(0, 1, combine=True))
    clock.seconds = 60.0
    matcher.add(report(0, 2))
    matcher.add(report(0, 3))
    matcher.add(report(1, 1))

    assert matcher.add(report(0, 4, combine=True)) == []


def test_rank_that_is_only_slow_is_waited_for() -> None:
    clock = Clock()
    matcher = ReportMatcher(2, clock=clock)
    matcher.add(report(1, 1))
    matcher.add(report(0, 1))
    for number in range(2, 9):
        clock.seconds += 60.0
        assert matcher.add(report(0, number, combine=True)) == []

    assert [matched.number for matched in matcher.add(report(1, 2))] == [2]


@pytest.mark.parametrize(("how", "expected"), [("mean", 2.0), ("sum", 6), ("min", 1), ("max", 3)])
def test_values_are_combined_over_the_ranks_that_report_them(how: str, expected: float) -> None:
    reports = {2: {"loss": 3}, 0: {"loss": 1}, 1: {"loss": 2}, 3: {"other": 9}}

    assert combine(reports, {"loss": how}) == {"loss": expected}


class SimpleMatcher:
    """States which reports are held and released, by looking at every rank after every event."""

    def __init__(self, world_size: int, clock: Clock) -> None:
        self.latest = dict.fromkeys(range(world_size), 0)
        self.running = set(self.latest)
        self.silent: set[int] = set()
        self.held: dict[int, float] = {}
        self.clock = clock

    def add(self, rank: int, number: int, *, hold: bool) -> list[int]:
        self.latest[rank] = number
        self.silent.discard(rank)
        if hold:
            self.held.setdefault(number, self.clock())
        return self.release()

    def finish(self, rank: int) -> list[int]:
        self.running.discard(rank)
        return self.release()

    def release(self) -> list[int]:
        if self.held:
            oldest = min(self.held)
            if max(self.latest.values()) >= oldest + 2 and self.clock() - self.held[oldest] >= 10:
                self.silent |= {rank for rank in self.running if self.latest[rank] == 0}
        reached = min((self.latest[rank] for rank in self.running - self.silent), default=None)
        released = sorted(number for number in self.held if reached is None or number <= reached)
        for number in released:
            del self.held[number]
        return released


@pytest.mark.parametrize("seed", range(200))
def test_reports_are_released_exactly_when_every_awaited_rank_has_reached_them(seed: int) -> None:
    choose = random.Random(seed)
    size, clock = choose.randint(1, 6), Clock()
    matcher, expected = ReportMatcher(size, clock=clock), SimpleMatcher(size, clock)
    reporting = choose.sample(range(size), choose.randint(1, size))
    running = set(range(size))

    for _ in range(choose.randint(1, 60)):
        clock.seconds += choose.choice([0, 1, 6])
        rank = choose.choice(sorted(running))
        if choose.random() < 0.05:
            running.discard(rank)
            released, simple = matcher.finish(rank), expected.finish(rank)
        elif rank in reporting or choose.random() < 0.02:
            number, hold = expected.latest[rank] + 1, choose.random() < 0.4
            released, simple = matcher.add(report(rank, number, combine=hold)), expected.add(rank, number, hold=hold)
        else:
            continue
        assert [matched.number for matched in released] == simple
        assert matcher.waits_up_to(70) == bool(expected.held)
        if not running:
            break
