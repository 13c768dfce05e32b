"""The limits of the time without progress: for each phase of an attempt, given and learned."""

import time

import pytest

from drivetrain import ConfigurationError, RunConfig
from drivetrain._driver.progress import HangLimits, Progress
from drivetrain._driver.ranks import Ranks
from drivetrain._wire.events import PhaseEntered, Progressed, RankState, ReportNumber
from drivetrain.plugin import WorkerInfo


class Attempt:
    """Two training ranks, and the virtual time in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, value: object) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        workers = [
            WorkerInfo(rank=rank, local_rank=rank, node_rank=0, node_id="a", hostname="a", ip="", pid=rank)
            for rank in range(2)
        ]
        ranks = Ranks(workers, ReportNumber(0, 0), "torch")
        for rank in range(2):
            ranks.apply(PhaseEntered(rank, RankState.TRAINING, self.now))
        config = RunConfig(hang_timeout_s=value)  # type: ignore[arg-type]
        self.limits = HangLimits.of(config.hang_timeout_s)
        self.progress = Progress(ranks, self.limits)

    def step(self, seconds: float, *ranks: int) -> None:
        """Let time pass, after which ranks make progress."""
        self.now += seconds
        for rank in ranks:
            self.progress.note(Progressed(rank), 0.0)

    def is_hung_after(self, seconds: float) -> bool:
        """Return True if this time without progress is a hang, and not before."""
        check = self.progress.next_check()
        before, self.now = self.now, self.now + seconds
        stopped = self.progress.stopped()
        self.now = before
        assert not stopped or (check is not None and check <= before + seconds)
        return bool(stopped)


def test_number_limits_both_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(monkeypatch, 10)
    assert not attempt.is_hung_after(10.9)
    assert attempt.is_hung_after(11.1)
    attempt.step(9, 0, 1)
    assert not attempt.is_hung_after(10.9)
    assert attempt.is_hung_after(11.1)


def test_each_phase_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(monkeypatch, {"first": 600, "next": 10})
    assert attempt.limits.interval_s == 1.0
    assert not attempt.is_hung_after(600)
    assert attempt.is_hung_after(602)
    attempt.step(500, 0)
    assert not attempt.is_hung_after(10.9)
    assert attempt.is_hung_after(11.1)


def test_time_until_the_last_rank_starts_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(monkeypatch, 10)
    attempt.step(1, 0)
    attempt.now += 30
    attempt.progress.note(PhaseEntered(1, RankState.TRAINING, attempt.now), 0.0)
    assert not attempt.is_hung_after(10.9)
    assert attempt.is_hung_after(11.1)


@pytest.mark.parametrize(
    ("value", "first", "following"),
    [({"first": 5}, True, False), ({"next": 5}, False, True), (None, False, False), ("auto", False, False)],
)
def test_missing_limit_is_none(monkeypatch: pytest.MonkeyPatch, value: object, first: bool, following: bool) -> None:
    attempt = Attempt(monkeypatch, value)
    assert attempt.is_hung_after(1e6) == first
    assert (attempt.progress.next_check() is not None) == first
    attempt.step(1, 0, 1)
    assert attempt.is_hung_after(1e6) == following


def test_learned_limit_is_ten_times_the_longest_time_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(monkeypatch, "auto")
    for _ in range(10):
        attempt.step(1, 0, 1)
    assert not attempt.is_hung_after(1e6), "too little is known"
    attempt.step(1, 0, 1)
    assert not attempt.is_hung_after(60), "the limit is never below a minute"
    assert attempt.is_hung_after(62)
    attempt.step(20, 0, 1)  # an evaluation
    assert not attempt.is_hung_after(200)
    assert attempt.is_hung_after(202)
    assert attempt.progress.describe_limit().startswith("200 s (10 times")


def test_learned_limit_finds_a_single_rank_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(monkeypatch, {"first": 100, "next": "auto"})
    for _ in range(15):
        attempt.step(1, 0, 1)
    for _ in range(70):
        attempt.step(1, 0)
    assert attempt.progress.stopped() == [1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("later", 'expected seconds, "auto" or a mapping'),
        ({}, 'expected a mapping such as {"first": 600, "next": 60}'),
        ({"start": 5}, "got {'start': 5}"),
        ({"first": "auto"}, r"\['first'\]: expected a positive number of seconds, got 'auto'"),
        ({"next": 0}, r"\['next'\]: expected a positive number of seconds, got 0"),
        (-1, "expected a positive number of seconds, got -1"),
    ],
)
def test_wrong_limit_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RunConfig(hang_timeout_s=value)  # type: ignore[arg-type]
