"""One attempt and one run, driven only by scripted events, in every order."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from drivetrain import FailureConfig, FailureKind, RunCancelledError, RunConfig, ScalingConfig
from drivetrain._base.console import Console
from drivetrain._base.failure import Failure
from drivetrain._base.interrupts import Interrupts
from drivetrain._driver.attempt import Attempt
from drivetrain._driver.controller import Controller
from drivetrain._driver.outcomes import AttemptFailed, Ending, Grow, RunFailed, Succeeded
from drivetrain._driver.policies import RetryBudget
from drivetrain._driver.services import RunServices
from drivetrain._driver.states import AttemptState
from drivetrain._driver.tasks import TaskFactory
from drivetrain._hooks.backend import NoBackend
from drivetrain._hooks.callback import Callbacks
from drivetrain._hooks.context import Run
from drivetrain._runtimes.base import GroupSpec
from drivetrain._storage.manifest import CheckpointManager
from drivetrain._wire.commands import CountSteps, Renumber, StopAfter
from drivetrain._wire.events import (
    Event,
    Exited,
    Failed,
    PhaseEntered,
    PreemptionPolled,
    RankState,
    Renumbered,
    Reported,
    ReportNumber,
    Returned,
    SigtermReceived,
)
from tests.core.scripted import OUTSIDE, TRAINING, ScriptedGroup, ScriptedRank, cancel, report, start
from tests.support import Collector, local_storage

ORDERS = list(product((0, 1, OUTSIDE), repeat=5))
RESUMED = ReportNumber(10, 8)  # a resumed run with two quiet reports


class Survivors(NoBackend):
    """Keeps the surviving ranks when others are lost; the test decides when they have rejoined."""

    survives_losses = True

    def __init__(self) -> None:
        self.rejoined: Future[Sequence[dict[str, str]]] = Future()

    def rejoin(self, group: Any, lost: Sequence[int]) -> Future[Any]:
        return self.rejoined


@contextlib.contextmanager
def run_services(
    directory: Path, *, backend: NoBackend | None = None, grace_s: float = 30.0, **run_config: Any
) -> Iterator[RunServices]:
    storage = local_storage(directory)
    directory.mkdir(exist_ok=True)
    run = Run(
        name="run",
        id="01234567",
        path=directory,
        location=str(directory),
        storage=storage,
        scaling_config=ScalingConfig(num_workers=(1, 3), elastic_resize_monitor_interval_s=1e-9),
        run_config=RunConfig(
            name="run",
            storage_path=directory.parent,
            failure_config=FailureConfig(preemption_grace_s=grace_s, max_failures=1),
            **run_config,
        ),
        train_loop_config=None,
        console=Console(),
    )
    interrupts, checkpoints = Interrupts(), CheckpointManager(storage)
    callbacks = Callbacks([Collector()], run)
    try:
        yield RunServices(
            run=run,
            backend=backend or NoBackend(),
            checkpoints=checkpoints,
            callbacks=callbacks,
            interrupts=interrupts,
        )
    finally:
        checkpoints.close()
        interrupts.close()


class Room:
    """The number of workers that an elastic run could have."""

    def __init__(self) -> None:
        self.size = 2

    def grow(self) -> None:
        self.size = 3


def follow(services: RunServices, group: ScriptedGroup, room: Room | None = None) -> tuple[Attempt, Ending]:
    attempt = Attempt(services, group, RESUMED, lambda: (room or Room()).size)
    for rank in range(len(group.ranks)):
        group.begin(rank, RESUMED)
    with services.interrupts.handled_by(attempt.request_end):
        return attempt, attempt.follow()


def polling(rank: int, *, checkpoints: bool = False, reports: int = 2) -> list[Event]:
    """Return the events of a train function that can save on request."""
    names = [f"checkpoint_{RESUMED.number + 1 + place:06d}" if checkpoints else None for place in range(reports)]
    return [start(rank), PreemptionPolled(rank), *(report(rank, checkpoint=name) for name in names), Returned(rank, 0)]


def check_agreement(group: ScriptedGroup) -> None:
    """Check that counts are requested once, and that the stop step is sent once to the ranks that sent their counts."""
    kinds = [type(command) for _, command in group.sent]
    assert kinds in ([], [CountSteps], [CountSteps, StopAfter])
    if len(kinds) == 2:
        assert set(group.sent[1][0]) <= set(group.sent[0][0])


def was_polled(group: ScriptedGroup) -> bool:
    return any(isinstance(event, PreemptionPolled) for event in group.delivered)


def saved(group: ScriptedGroup) -> bool:
    return any(isinstance(event, Returned) and event.unfinished for event in group.delivered)


def test_run_cancelled_at_any_moment_saves_if_it_can(tmp_path: Path) -> None:
    endings = set()
    for order in ORDERS:
        with run_services(tmp_path) as services:
            interrupts = services.interrupts
            actions = [lambda interrupts=interrupts: cancel(interrupts)]
            group = ScriptedGroup(
                [ScriptedRank(rank, polling(rank)) for rank in (0, 1)], order, actions, services.interrupts
            )
            try:
                attempt, ending = follow(services, group)
            except RunCancelledError:
                assert not was_polled(group), order
                endings.add("at once")
                continue
            check_agreement(group)
            if saved(group):
                assert isinstance(ending, AttemptFailed), order
                assert ending.failure.kind is FailureKind.PREEMPTION
                assert ending.failure.summary.startswith("preempted: the run was cancelled; all ranks returned")
                assert attempt.state is AttemptState.PREEMPTED
            else:
                assert isinstance(ending, Succeeded), order
            assert not services.interrupts.can_end_gracefully
            endings.add(type(ending).__name__)
    assert endings == {"at once", "AttemptFailed", "Succeeded"}


def test_second_request_ends_the_attempt_at_once(tmp_path: Path) -> None:
    with run_services(tmp_path) as services:
        actions = [lambda: cancel(services.interrupts)] * 2
        ranks = [ScriptedRank(rank, polling(rank, reports=9), saves=False) for rank in (0, 1)]
        group = ScriptedGroup(ranks, [0, 0, 1, 1, OUTSIDE, 0, OUTSIDE], actions, services.interrupts)
        with pytest.raises(RunCancelledError):
            follow(services, group)


def test_rank_that_tears_down_its_connections_counts_as_finished_in_the_error_of_its_peer(tmp_path: Path) -> None:
    """A peer that waits for it fails, and this failure may arrive before the return value."""
    with run_services(tmp_path) as services:
        failing = ScriptedRank(0, [start(0), Failed(0, 1.0, TRAINING, ConnectionError("closed by peer"))])
        leaving = ScriptedRank(1, [start(1), PhaseEntered(1, RankState.TEARING_DOWN, 1.0)])
        _, ending = follow(services, ScriptedGroup([failing, leaving], [0, 1, 1, 0]))
    assert isinstance(ending, AttemptFailed)
    assert ending.notes == ("ranks that had already finished: 1",)


def test_run_grows_after_a_commit_whenever_there_is_room(tmp_path: Path) -> None:
    endings = set()
    for number, order in enumerate(product((0, 1, OUTSIDE), repeat=4)):
        with run_services(tmp_path / str(number)) as services:
            room = Room()
            ranks = [ScriptedRank(0, polling(0, checkpoints=True)), ScriptedRank(1, polling(1))]
            group = ScriptedGroup(ranks, [*order, 1, 0, 1, 0, 1, 0, OUTSIDE], [room.grow])
            attempt, ending = follow(services, group, room)
            check_agreement(group)
            if isinstance(ending, Grow):
                assert ending.size == 3
                assert attempt.state is AttemptState.GROWN
                assert saved(group), order
            else:
                assert isinstance(ending, Succeeded), order
                assert not saved(group), order
            endings.add(type(ending))
    assert endings == {Grow, Succeeded}


def test_run_that_cannot_save_grows_at_once_after_a_commit(tmp_path: Path) -> None:
    with run_services(tmp_path) as services:
        room = Room()
        room.grow()
        scripts = [
            [start(0), report(0, checkpoint="checkpoint_000011"), report(0), Returned(0, None)],
            [start(1), report(1), report(1), Returned(1, None)],
        ]
        group = ScriptedGroup([ScriptedRank(rank, scripts[rank]) for rank in (0, 1)], [0, 1, 0, 1])
        attempt, ending = follow(services, group, room)

    assert ending == Grow(3)
    assert attempt.state is AttemptState.GROWN
    assert len(group.delivered) == 4
    assert group.sent == []


def test_growth_that_a_rank_ignores_is_not_a_preemption(tmp_path: Path) -> None:
    with run_services(tmp_path, grace_s=0.05) as services:
        room = Room()
        room.grow()
        stubborn = [start(1), PreemptionPolled(1), report(1)]
        ranks = [ScriptedRank(0, polling(0, checkpoints=True)), ScriptedRank(1, stubborn, saves=False)]
        _, ending = follow(services, ScriptedGroup(ranks, [0, 0, 1, 1, 1]), room)

    assert ending == Grow(3)


def test_preemption_that_a_rank_ignores_ends_after_the_grace_period(tmp_path: Path) -> None:
    with run_services(tmp_path, grace_s=1.0) as services:
        stubborn = [start(1), PreemptionPolled(1), SigtermReceived(1, True)]
        ranks = [ScriptedRank(0, polling(0)), ScriptedRank(1, stubborn, saves=False)]
        _, ending = follow(services, ScriptedGroup(ranks, [0, 0, 0, 0, 0, 1, 1, 1]))

    assert isinstance(ending, AttemptFailed)
    assert "ranks [1] did not return within 1 s" in ending.failure.summary


def test_run_that_is_cancelled_while_it_grows_does_not_restart(tmp_path: Path) -> None:
    cancelled = 0
    for number, order in enumerate(product((0, 1, OUTSIDE), repeat=4)):
        with run_services(tmp_path / str(number)) as services:
            room, interrupts = Room(), services.interrupts
            room.grow()
            ranks = [ScriptedRank(0, polling(0, checkpoints=True)), ScriptedRank(1, polling(1, reports=3))]
            actions = [lambda interrupts=interrupts: cancel(interrupts)]
            group = ScriptedGroup(ranks, [0, 0, 1, 1, *order], actions, services.interrupts)
            larger = ScriptedGroup([ScriptedRank(rank, polling(rank)) for rank in range(3)])
            try:
                outcome = controller_of(services, group, larger, room).run()
            except RunCancelledError:
                cancelled += 1
                check_agreement(group)
                assert not larger.tasks, f"another attempt after {order}"
            else:
                assert isinstance(outcome, Succeeded), order
                assert interrupts.error is None, order
    assert 50 < cancelled < 81


def test_failure_at_any_moment_decides_the_outcome(tmp_path: Path) -> None:
    outcomes = set()
    for order in ORDERS:
        with run_services(tmp_path) as services:
            ranks = [ScriptedRank(rank, polling(rank)) for rank in (0, 1)]
            group = ScriptedGroup(ranks, order)
            preempt = SigtermReceived(0, True)
            failed = Failed(1, 1.0, TRAINING, ValueError("mine"))
            group.act(lambda group=group, event=preempt: group.ranks[0].interject(event))
            group.act(lambda group=group, event=failed: group.ranks[1].interject(event))
            _, ending = follow(services, group)
            check_agreement(group)
            has_failed = failed in group.delivered
            if has_failed:
                assert isinstance(ending, AttemptFailed), order
                assert str(ending.failure.exception) == "mine"
            else:
                assert isinstance(ending, Succeeded) is not saved(group), order
            outcomes.add((has_failed, type(ending)))
    assert outcomes >= {(True, AttemptFailed), (False, Succeeded)}


@pytest.mark.parametrize("event", [SigtermReceived(1, True), report(1)], ids=["preemption", "nothing"])
def test_met_stop_condition_ends_the_training_whatever_happens_later(tmp_path: Path, event: Event) -> None:
    for order in ORDERS:
        with run_services(tmp_path, stop={"enough": 1.0}) as services:
            enough = report(0, enough=1.0)
            script = [start(0), PreemptionPolled(0), report(0), enough, *(report(0) for _ in range(9))]
            ranks = [ScriptedRank(0, script, saving=[enough]), ScriptedRank(1, polling(1, reports=9))]
            group = ScriptedGroup(ranks, order)
            group.act(lambda group=group: group.ranks[1].interject(event))
            attempt, ending = follow(services, group)
            if any(isinstance(each, Reported) and "enough" in each.metrics for each in group.delivered):
                assert isinstance(ending, Succeeded), order
                assert ending.metrics is not None
                assert ending.metrics["enough"] == 1.0
                assert attempt.state is AttemptState.SUCCEEDED
            else:
                pytest.fail(f"{ending} after {order}")


def test_lost_rank_is_replaced_and_reports_continue_after_an_unused_number(tmp_path: Path) -> None:
    replaced = 0
    for order in product((0, 1, OUTSIDE), repeat=6):
        with run_services(tmp_path, backend=Survivors()) as services:
            ranks = [ScriptedRank(rank, polling(rank, reports=3), in_flight=order[0] == 1) for rank in (0, 1)]
            group = ScriptedGroup(ranks, [0, 0, 1, 1, *order])
            group.act(lambda group=group: group.ranks[1].interject(Exited(1, -9, "")))
            group.replacements[1] = [start(1), report(1), Returned(1, 1)]
            attempt, ending = follow(services, group)
            if not attempt.replaceable:
                continue
            assert isinstance(ending, AttemptFailed)
            before = len(group.delivered)
            last_report = replace_lost(group, attempt)
            if last_report is None:
                assert attempt.state in (AttemptState.REPLACING, AttemptState.FAILED), order
                assert any(isinstance(event, Returned) for event in group.delivered[before:]), order
                continue
            replaced += 1
            numbers = [(event.number, event.iteration) for event in group.delivered if isinstance(event, Reported)]
            assert last_report.number > max((number for number, _ in numbers), default=RESUMED.number), order
            assert last_report.iteration == max((each for _, each in numbers), default=RESUMED.iteration), order
            since = len(group.delivered)
            ending = attempt.follow()
            assert isinstance(ending, Succeeded), order
            assert list(ending.return_values) == [0, 1]
            later = [event for event in group.delivered[since:] if isinstance(event, Reported)]
            assert all(event.number > last_report.number for event in later), order
            assert all(event.number - last_report.number == event.iteration - last_report.iteration for event in later)
    assert replaced > 50


def replace_lost(group: ScriptedGroup, attempt: Attempt) -> ReportNumber | None:
    """Replace lost ranks as the controller does; a survivor pauses after its next event."""
    lost = list(attempt.replaceable)
    future: Future[Any] = Future()
    replacement = attempt.start_replacement()
    group.replace(lost)
    group.act(lambda: future.set_result([{}] * len(lost)))
    last_report = replacement.renumber() if replacement.await_rejoin(future, 10.0) else None
    if last_report is not None:
        attempt.resume(lost, group.workers, last_report)
        for rank in lost:
            group.begin(rank, last_report)
    return last_report


INTRUDERS: dict[str, Callable[[], Event]] = {
    "failure": lambda: Failed(0, 1.0, TRAINING, ValueError("mine")),
    "loss": lambda: Exited(0, -9, ""),
    "preemption": lambda: SigtermReceived(0, True),
    "return": lambda: Returned(0, None),
    "stop": lambda: report(0, enough=1.0),
}


@pytest.mark.parametrize("intruder", INTRUDERS)
@pytest.mark.parametrize("place", range(1, 4))
def test_nothing_is_replaced_if_the_other_rank_fails_or_finishes_meanwhile(
    tmp_path: Path, intruder: str, place: int
) -> None:
    with run_services(tmp_path, backend=Survivors(), stop={"enough": 1.0}) as services:
        scripts: list[list[Event]] = [[start(0), *(report(0) for _ in range(place))], [start(1), Exited(1, -9, "")]]
        scripts[0].append(INTRUDERS[intruder]())
        scripts.append([start(2)])
        group = ScriptedGroup([ScriptedRank(rank, scripts[rank]) for rank in range(3)], [0, 2, 1, 1])
        group.replacements[1] = [start(1)]
        attempt, ending = follow(services, group)
        assert attempt.replaceable == [1]
        assert replace_lost(group, attempt) is None
    assert isinstance(ending, AttemptFailed)
    assert ending.failure.rank == 1
    assert list(attempt.replaceable) == []


def test_rank_that_has_not_started_training_is_not_replaced(tmp_path: Path) -> None:
    for lost in (0, 1):
        with run_services(tmp_path, backend=Survivors()) as services:
            scripts: list[list[Event]] = [[Exited(0, -9, "")] if lost == 0 else [], [start(1)]]
            if lost == 1:
                scripts[1].append(Exited(1, -9, ""))
            group = ScriptedGroup([ScriptedRank(rank, scripts[rank]) for rank in (0, 1)], [1, 1, 0])
            attempt, ending = follow(services, group)
        assert isinstance(ending, AttemptFailed)
        assert list(attempt.replaceable) == []


def test_checkpoint_that_waits_for_a_lost_rank_is_never_committed(tmp_path: Path) -> None:
    with run_services(tmp_path, backend=Survivors()) as services:
        names = [f"checkpoint_{number:06d}" for number in (11, 13)]
        scripts: list[list[Event]] = [
            [start(0), report(0, checkpoint=names[0]), report(0, checkpoint=names[1]), Returned(0, None)],
            [start(1), Exited(1, -9, "")],
        ]
        ranks = [ScriptedRank(rank, scripts[rank]) for rank in (0, 1)]
        group = ScriptedGroup(ranks, [0, 1, 0, 1, OUTSIDE, OUTSIDE])
        group.replacements[1] = [start(1), report(1, checkpoint=names[1]), Returned(1, None)]
        group.act(lambda: None)  # the event after the loss
        attempt, _ = follow(services, group)
        assert replace_lost(group, attempt) == ReportNumber(12, 9)
        assert isinstance(attempt.follow(), Succeeded)
        assert [(entry.name, entry.number) for entry in services.checkpoints.committed] == [(names[1], 13)]


class ScriptedRuntime:
    """A runtime with one scripted group per attempt."""

    name = "scripted"
    in_driver = False

    def __init__(self, groups: Sequence[ScriptedGroup], room: Room) -> None:
        self._groups = deque(groups)
        self._room = room

    def validate(self, scaling: ScalingConfig) -> None:
        pass

    def room(self, scaling: ScalingConfig, running: Sequence[Any], avoided: frozenset[str]) -> int:
        return self._room.size if running else len(self._groups[0].workers)

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[ScriptedGroup]:
        yield self._groups.popleft()


def controller_of(services: RunServices, *groups: ScriptedGroup | Room) -> Controller:
    room = next((each for each in groups if isinstance(each, Room)), Room())
    runtime = ScriptedRuntime([each for each in groups if isinstance(each, ScriptedGroup)], room)
    tasks = TaskFactory(
        services,
        function=b"",
        split=lambda workers, checkpoint: [{} for _ in workers],
        metadata={},
        all_values=True,
    )
    policy = RetryBudget(services.run.run_config.failure_config)
    return Controller(services, runtime, tasks, policy, last_number=RESUMED.number)


def test_controller_replaces_a_lost_rank_and_sends_its_task_only_to_that_rank(tmp_path: Path) -> None:
    backend = Survivors()
    with run_services(tmp_path, backend=backend) as services:
        scripts: list[list[Event]] = [
            [start(0), report(0), report(0), Returned(0, "stayed")],
            [start(1), report(1), Exited(1, -9, "")],
        ]
        group = ScriptedGroup([ScriptedRank(rank, scripts[rank]) for rank in (0, 1)], [0, 1, 0, 1, 1, OUTSIDE])
        group.replacements[1] = [start(1), report(1), Returned(1, "new")]
        group.act(lambda: backend.rejoined.set_result([{"port": "1"}]))
        outcome = controller_of(services, group).run()

    assert isinstance(outcome, Succeeded)
    assert list(outcome.return_values) == ["stayed", "new"]
    assert [task.context.get_world_rank() for task in group.tasks] == [0, 1, 1]
    assert group.tasks[2].rendezvous == {"port": "1"}
    assert group.tasks[2].last_report == ReportNumber(RESUMED.number + 2, 1)
    assert [type(command) for _, command in group.sent] == [Renumber]
    assert [event for event in group.delivered if isinstance(event, Renumbered)] == [Renumbered(0)]


@pytest.mark.parametrize("name", [None, "checkpoint_000011"])
def test_policy_learns_whether_a_checkpoint_was_committed_before_a_rank_that_is_replaced_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    made_progress: list[bool] = []

    def decide(policy: RetryBudget, failure: Failure, history: Sequence[Failure]) -> bool:
        made_progress.append(failure.made_progress)
        return True

    monkeypatch.setattr(RetryBudget, "decide", decide)
    backend = Survivors()
    with run_services(tmp_path, backend=backend) as services:
        (tmp_path / "checkpoint_000011").mkdir()
        scripts: list[list[Event]] = [
            [start(0), report(0, checkpoint=name), report(0), Returned(0, None)],
            [start(1), report(1, checkpoint=name), Exited(1, -9, "")],
        ]
        group = ScriptedGroup([ScriptedRank(rank, scripts[rank]) for rank in (0, 1)], [0, 1, 0, 1, 1, OUTSIDE])
        group.replacements[1] = [start(1), report(1), Returned(1, None)]
        group.act(lambda: backend.rejoined.set_result([{}]))
        assert isinstance(controller_of(services, group).run(), Succeeded)
    assert made_progress == [name is not None]


def test_controller_replaces_all_ranks_when_one_does_not_rejoin(tmp_path: Path) -> None:
    backend = Survivors()
    backend.rejoined.cancel()
    with run_services(tmp_path, backend=backend) as services:
        scripts: list[list[Event]] = [[start(0), report(0)], [start(1), Exited(1, -9, "")]]
        first = ScriptedGroup([ScriptedRank(rank, scripts[rank]) for rank in (0, 1)], [0, 1, 1])
        first.replacements[1] = []
        second = ScriptedGroup([ScriptedRank(rank, polling(rank)) for rank in (0, 1)])
        outcome = controller_of(services, first, second).run()

    assert isinstance(outcome, Succeeded)
    assert len(second.tasks) == 2


def test_controller_states_what_failed_when_ranks_cannot_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Survivors()
    backend.rejoined.set_exception(RuntimeError("no free port"))
    with run_services(tmp_path, backend=backend) as services:
        scripts: list[list[Event]] = [[start(0), report(0)], [start(1), Exited(1, -9, "")]]
        first = ScriptedGroup([ScriptedRank(rank, scripts[rank]) for rank in (0, 1)], [0, 1, 1, 0])
        first.replacements[1] = []
        second = ScriptedGroup([ScriptedRank(rank, polling(rank)) for rank in (0, 1)])
        controller_of(services, first, second).run()

    printed = capsys.readouterr().err
    assert "while replacing ranks [1]: no free port" in printed
    assert "while ending the attempt" not in printed


def test_controller_that_gives_up_reports_the_history_of_its_attempts(tmp_path: Path) -> None:
    with run_services(tmp_path) as services:
        groups = [ScriptedGroup([ScriptedRank(0, [start(0), Exited(0, -9, "")])]) for _ in range(2)]
        outcome = controller_of(services, *groups).run()

    assert isinstance(outcome, RunFailed)
    assert outcome.failure.kind is FailureKind.INFRASTRUCTURE
    assert len(outcome.history) == 1


def test_controller_starts_a_larger_group_after_growth(tmp_path: Path) -> None:
    with run_services(tmp_path) as services:
        room = Room()
        room.grow()
        small = ScriptedGroup([ScriptedRank(0, polling(0, checkpoints=True)), ScriptedRank(1, polling(1))])
        large = ScriptedGroup([ScriptedRank(rank, polling(rank)) for rank in range(3)])
        outcome = controller_of(services, small, large, room).run()

    assert isinstance(outcome, Succeeded)
    assert len(large.tasks) == 3
    assert large.tasks[0].last_report.number > small.delivered[-1].rank
    assert services.interrupts.error is None
