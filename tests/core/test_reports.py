import pytest

from drivetrain._driver.reports import ReportMatcher, combine
from drivetrain._storage.filesystem import StoredFile
from drivetrain._wire.events import Reported


def report(
    rank: int,
    number: int,
    *,
    files: dict[str, StoredFile] | None = None,
    reduce: dict[str, str] | None = None,
    **metrics: float,
) -> Reported:
    return Reported(rank, number, number, 0.0, metrics, files, reduce, None if files is None else "checkpoint")


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_report_without_checkpoint_and_combination_waits_for_no_other_rank() -> None:
    matcher = ReportMatcher(2)

    assert matcher.add(report(0, 1)) == matcher.add(report(0, 2)) == []
    assert not matcher.holds_up_to(2)


def test_checkpoint_is_complete_when_every_rank_has_passed_its_report() -> None:
    matcher = ReportMatcher(3)

    assert matcher.add(report(0, 1, files={"a": StoredFile(1)}, step=1)) == []
    assert matcher.add(report(1, 1)) == []
    assert matcher.holds_up_to(1)
    (matched,) = matcher.add(report(2, 1, files={"c": StoredFile(3)}))

    assert (matched.number, matched.files) == (1, {0: {"a": StoredFile(1)}, 2: {"c": StoredFile(3)}})
    assert matched.metrics[0] == {"step": 1}
    assert not matcher.holds_up_to(1)


def test_held_reports_are_settled_in_order() -> None:
    matcher = ReportMatcher(2)
    for number in (1, 2, 3):
        assert matcher.add(report(0, number, files={"a": StoredFile(number)})) == []

    assert [matched.number for matched in matcher.add(report(1, 1))] == [1]
    assert [matched.number for matched in matcher.finish(1)] == [2, 3]


def test_checkpoint_of_a_rank_that_finishes_is_not_waited_for() -> None:
    matcher = ReportMatcher(2)
    assert matcher.finish(1) == []

    assert [matched.number for matched in matcher.add(report(0, 1, files={"a": StoredFile(1)}))] == [1]


def test_rank_that_never_reports_is_not_waited_for_after_many_reports_of_others() -> None:
    clock = Clock()
    matcher = ReportMatcher(2, clock=clock)
    assert matcher.add(report(0, 1, files={"a": StoredFile(1)})) == []
    clock.seconds = 60.0
    assert matcher.add(report(0, 2)) == []

    assert [matched.number for matched in matcher.add(report(0, 3))] == [1]
    assert [matched.number for matched in matcher.add(report(0, 4, files={"a": StoredFile(1)}))] == [4]


def test_silent_rank_is_waited_for_again_once_it_reports() -> None:
    clock = Clock()
    matcher = ReportMatcher(2, clock=clock)
    matcher.add(report(0, 1, files={"a": StoredFile(1)}))
    clock.seconds = 60.0
    matcher.add(report(0, 2))
    matcher.add(report(0, 3))
    matcher.add(report(1, 1))

    assert matcher.add(report(0, 4, files={"a": StoredFile(1)})) == []


def test_rank_that_is_only_slow_is_waited_for() -> None:
    clock = Clock()
    matcher = ReportMatcher(2, clock=clock)
    matcher.add(report(1, 1))
    matcher.add(report(0, 1))
    for number in range(2, 9):
        clock.seconds += 60.0
        assert matcher.add(report(0, number, files={"a": StoredFile(1)})) == []

    assert [matched.number for matched in matcher.add(report(1, 2))] == [2]


@pytest.mark.parametrize(("how", "expected"), [("mean", 2.0), ("sum", 6), ("min", 1), ("max", 3)])
def test_values_are_combined_over_the_ranks_that_report_them(how: str, expected: float) -> None:
    reports = {2: {"loss": 3}, 0: {"loss": 1}, 1: {"loss": 2}, 3: {"other": 9}}

    assert combine(reports, {"loss": how}) == {"loss": expected}
