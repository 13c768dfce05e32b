"""Which ranks a checkpoint waits for, and for how long."""

from typing import Any, Literal

import pytest

from drivetrain._driver.pending import SHORT_WAIT_S, PendingCheckpoints
from drivetrain._storage.committed import CommittedCheckpoint
from drivetrain._storage.filesystem import StoredFile
from drivetrain._wire.events import FilesAnnounced, Reported, Uploaded

FILES = {"file": StoredFile(1)}


class Driver:
    """The pending checkpoints of an attempt, on a clock that a test moves."""

    def __init__(self, world_size: int, committed: tuple[CommittedCheckpoint, ...] = ()) -> None:
        self.now = 0.0
        self.pending = PendingCheckpoints(world_size, 0, committed, clock=lambda: self.now)
        self.pending.note_started()
        self.withdrawn: list[int] = []

    def save(
        self,
        rank: int,
        number: int,
        *,
        files: dict[str, StoredFile] | None = FILES,
        ranks: tuple[int, ...] | Literal["all"] | None = None,
        **options: Any,
    ) -> list[int]:
        """Report files; return the numbers of the checkpoints that are complete then."""
        self.announce(rank, number)
        event = Reported(rank, number, number, 0.0, {}, files, directory=f"c{number}", reduce=None)
        self.pending.add(event._replace(checkpoint_ranks=ranks, **options))
        return self.complete()

    def report(self, rank: int, number: int, reduce: dict[str, str] | None = None) -> list[int]:
        """Report without files."""
        self.pending.add(Reported(rank, number, number, 0.0, {}, None, reduce))
        return self.complete()

    def announce(self, rank: int, number: int) -> None:
        incomplete = self.pending.announce(FilesAnnounced(rank, number))
        self.withdrawn = [checkpoint.number for checkpoint in incomplete]

    def wait(self, seconds: float) -> list[int]:
        self.now += seconds
        return self.complete()

    def complete(self) -> list[int]:
        return [checkpoint.number for checkpoint in self.pending.take_complete()]


def committed(world_size: int, *ranks: int) -> CommittedCheckpoint:
    """Return a checkpoint of an earlier attempt."""
    return CommittedCheckpoint(
        name="checkpoint_000001", number=1, iteration=1, metrics={}, time=0.0, world_size=world_size, ranks=ranks
    )


@pytest.mark.parametrize("ranks", [None, (0,)])
def test_only_the_first_checkpoint_waits_for_ranks_that_never_report(ranks: tuple[int, ...] | None) -> None:
    driver = Driver(4)

    assert driver.save(0, 1, ranks=ranks) == []
    assert driver.wait(SHORT_WAIT_S / 2) == []
    assert driver.save(0, 2, ranks=ranks) == []
    assert driver.wait(SHORT_WAIT_S / 2) == [1, 2], "the ranks count as not contributing from now on"
    assert driver.save(0, 3, ranks=ranks) == [3]


def test_short_wait_does_not_begin_before_all_ranks_are_in_the_train_function() -> None:
    driver = Driver(2)
    driver.pending = PendingCheckpoints(2, clock=lambda: driver.now)
    driver.save(0, 1)

    assert driver.pending.next_expiry is None
    assert driver.wait(60) == []
    driver.pending.note_started()
    assert driver.pending.next_expiry == 60 + SHORT_WAIT_S
    assert driver.wait(SHORT_WAIT_S) == [1]


def test_rank_that_passes_the_first_checkpoint_without_files_is_not_awaited_again() -> None:
    driver = Driver(2)
    driver.report(1, 1)

    assert driver.save(0, 1) == [1], "rank 1 has passed it already"
    assert driver.report(1, 2) == []
    assert driver.save(0, 2) == [2]
    driver.save(0, 3)
    driver.wait(SHORT_WAIT_S)
    assert driver.save(0, 4) == [4], "rank 1 does not keep pace"


@pytest.mark.parametrize("ranks", [None, (0,)])
def test_report_of_a_rank_that_keeps_pace_is_awaited_for_a_short_time(ranks: tuple[int, ...] | None) -> None:
    driver = Driver(2, (committed(2, 0),))

    assert driver.save(0, 1, ranks=ranks) == []
    assert driver.report(1, 1) == [1]
    assert driver.save(0, 2, ranks=ranks) == []
    assert driver.wait(SHORT_WAIT_S) == [2]
    assert driver.save(0, 3, ranks=ranks) == [3], "the rank has fallen behind"
    assert driver.report(1, 2) == driver.report(1, 3) == []
    assert driver.save(0, 4, ranks=ranks) == []
    assert driver.save(0, 5, ranks=ranks) == [], "an earlier checkpoint waits for the rank"
    assert driver.report(1, 4) == [4]
    assert driver.report(1, 5) == [5]
    assert driver.save(0, 6, ranks=ranks) == []
    driver.pending.restart(5, [1])
    assert list(driver.pending) == [], "the lost rank will make the report again"


def test_extra_reports_of_the_rank_that_saves_delay_no_checkpoint() -> None:
    driver, number = Driver(2), 0
    for step in range(1, 31):
        number += 1
        assert driver.report(0, number) == driver.report(1, step) == []
        if step % 10 == 0:
            number += 1
            assert driver.save(0, number) == ([] if step == 10 else [number])
            assert driver.wait(SHORT_WAIT_S) == ([number] if step == 10 else [])


def test_contributor_of_the_checkpoint_before_is_awaited_however_slow_it_is() -> None:
    driver = Driver(3)
    driver.save(0, 1)
    driver.report(2, 1)
    assert driver.save(1, 1) == [1]

    assert driver.save(0, 2) == []
    assert driver.wait(1000) == []
    held = driver.pending.get(2)
    assert held is not None
    assert held.missing == [1]
    assert driver.save(1, 2) == [2]


def test_contributor_that_finishes_is_not_awaited() -> None:
    driver = Driver(2)
    driver.save(0, 1)
    driver.save(1, 1)
    driver.save(0, 2)

    driver.pending.finish(1)

    assert driver.complete() == [2]
    assert driver.save(0, 3) == [3]


def test_rank_that_contributes_sometimes_is_awaited_for_a_short_time() -> None:
    driver = Driver(2)
    driver.save(0, 1)
    assert driver.save(1, 1) == [1]
    driver.save(0, 2)
    assert driver.report(1, 2) == [2]

    assert driver.save(0, 3) == []
    assert driver.save(1, 3) == [3]
    driver.save(0, 4)
    assert driver.report(1, 4) == [4]
    assert driver.save(0, 5) == []
    assert driver.wait(SHORT_WAIT_S) == [5]


def test_rank_that_is_storing_files_is_awaited_beyond_the_short_wait() -> None:
    driver = Driver(2)
    driver.announce(1, 1)
    driver.save(0, 1)

    assert driver.wait(1000) == []
    assert driver.save(1, 1) == [1]


def test_rank_that_could_not_store_its_files_is_not_awaited_once_it_makes_the_report_without_them() -> None:
    driver = Driver(2)
    driver.announce(1, 1)
    driver.save(0, 1)

    assert driver.report(1, 1) == [1]


def test_background_upload_is_awaited() -> None:
    driver = Driver(2)
    driver.report(1, 1)

    assert driver.save(0, 1, files=None) == []
    driver.report(1, 2)
    assert driver.save(0, 2) == [2], "a later checkpoint can be complete first"
    driver.pending.upload(Uploaded(0, 1, FILES))
    assert driver.complete() == [1]


def test_files_after_the_commit_withdraw_the_checkpoints_that_lack_them() -> None:
    driver = Driver(2)
    driver.save(0, 1)
    assert driver.wait(SHORT_WAIT_S) == [1]
    assert driver.save(0, 2) == [2]

    driver.announce(1, 1)

    assert driver.withdrawn == [1, 2]
    assert driver.save(0, 3) == []
    assert driver.save(1, 1) == [1]
    assert driver.save(1, 2) == [2]
    assert driver.report(1, 3) == [3]


def test_files_of_a_rank_that_contributes_only_to_some_checkpoints_withdraw_none() -> None:
    driver = Driver(2)
    driver.report(1, 1)
    assert driver.save(0, 1) == [1]
    driver.save(0, 2)
    assert driver.wait(SHORT_WAIT_S) == [2]
    assert driver.save(0, 3) == [3]

    driver.announce(1, 2)

    assert driver.withdrawn == []
    assert [held.number for held in driver.pending] == [2], "the files are added to the committed checkpoint"
    assert driver.save(1, 2) == [2]
    assert driver.save(0, 4) == []
    assert driver.save(1, 4) == [4]


def test_files_of_a_rank_that_was_not_declared_are_added_to_the_committed_checkpoint() -> None:
    driver = Driver(2)
    driver.save(0, 1)
    driver.save(1, 1)
    driver.save(0, 2, ranks=(0,))
    assert driver.wait(SHORT_WAIT_S) == [2]

    driver.announce(1, 2)
    assert driver.withdrawn == []
    assert driver.save(1, 2) == [2]


def test_files_for_a_checkpoint_that_retention_has_dropped_belong_to_none() -> None:
    driver = Driver(2)
    driver.save(0, 1)
    driver.wait(SHORT_WAIT_S)
    driver.save(0, 2)
    assert [checkpoint.number for checkpoint in driver.pending.close({2})] == [1]

    assert driver.save(1, 1) == []
    assert driver.pending.is_closed(1)
    assert driver.pending.get(1) is None
    assert driver.save(1, 2) == [2]


@pytest.mark.parametrize("ranks", ["all", (0, 1, 2)])
def test_declared_ranks_are_awaited_and_others_are_not(ranks: Any) -> None:
    driver = Driver(3 if ranks == "all" else 4)

    assert driver.save(0, 1, ranks=ranks) == []
    assert driver.save(1, 1, ranks=ranks) == driver.wait(1000) == []
    assert driver.save(2, 1, ranks=ranks) == [1]


def test_checkpoint_that_one_rank_declares_for_itself_waits_for_no_files_of_another() -> None:
    driver = Driver(2)
    driver.save(0, 1)
    driver.save(1, 1)

    driver.save(0, 2, ranks=(0,))
    assert driver.wait(SHORT_WAIT_S) == [2]


def test_declared_rank_that_passes_the_checkpoint_without_files_is_named() -> None:
    driver = Driver(2)
    driver.save(0, 1, ranks="all")
    driver.pending.add(Reported(1, 1, 1, 0.0, {}, None, None))

    (checkpoint,) = driver.pending.take_complete()
    assert checkpoint.undelivered == [1]


@pytest.mark.parametrize(
    ("entry", "awaited"),
    [
        (committed(2, 0), []),
        (committed(2), [1]),
        (committed(4), [1]),
        (committed(4, 0, 1), [1]),
    ],
)
def test_new_attempt_knows_the_contributors_from_the_manifest(entry: CommittedCheckpoint, awaited: list[int]) -> None:
    driver = Driver(2, (entry,))

    assert driver.save(0, 2) == ([] if awaited else [2])
    assert driver.wait(1000) == []


def test_ranks_that_the_checkpoint_before_did_not_have_are_awaited_for_a_short_time() -> None:
    driver = Driver(3, (committed(2),))
    driver.save(0, 2)
    driver.save(1, 2)

    assert driver.wait(SHORT_WAIT_S) == [2]


def test_metrics_to_combine_are_awaited() -> None:
    driver = Driver(2, (committed(2, 0),))
    driver.report(0, 1, {"loss": "mean"})
    driver.report(1, 1, {"loss": "mean"})

    assert driver.save(0, 2, reduce={"loss": "mean"}) == driver.wait(1000) == []
    assert driver.report(1, 2, {"loss": "mean"}) == [2]


def test_metrics_of_rank_0_are_awaited_for_a_short_time() -> None:
    driver = Driver(2, (committed(2, 1),))

    assert driver.save(1, 2) == []
    assert driver.report(0, 2) == [2]
    assert driver.save(1, 3) == []
    assert driver.wait(SHORT_WAIT_S) == [3]


def test_replaced_ranks_continue_with_a_new_number_and_uploads_of_the_others_are_kept() -> None:
    driver = Driver(2)
    driver.report(1, 1)
    driver.save(0, 1, files=None)
    driver.save(1, 2)

    driver.pending.restart(7, [1])
    driver.pending.note_started()

    driver.pending.upload(Uploaded(0, 1, FILES))
    assert driver.complete() == [1]
    assert driver.save(0, 8) == []
    assert driver.save(1, 8) == [8]
