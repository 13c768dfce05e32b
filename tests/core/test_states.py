"""The transition table of an attempt, tested with all orders of triggers."""

from itertools import product

import pytest

from drivetrain._driver.ranks import next_rank_state
from drivetrain._driver.states import ATTEMPT_TRANSITIONS, AttemptState, StateMachine, Trigger
from drivetrain._wire.events import Exited, Failed, PhaseEntered, RankState, Returned

FINAL = {AttemptState.SUCCEEDED, AttemptState.PREEMPTED, AttemptState.GROWN, AttemptState.FAILED}


def states_after(triggers: tuple[Trigger, ...]) -> list[AttemptState]:
    machine = StateMachine()
    states = []
    for trigger in triggers:
        before = machine.state
        assert machine.apply(trigger) is (machine.state is not before)
        states.append(machine.state)
    return states


def test_every_order_of_four_triggers_satisfies_the_invariants() -> None:
    for triggers in product(Trigger, repeat=4):
        states = states_after(triggers)
        ended = next((place for place, state in enumerate(states) if state in FINAL), None)
        if ended is not None:
            assert set(states[ended:]) == {states[ended]}, f"a final state changed after {triggers}"
        failing = [place for place, trigger in enumerate(triggers) if trigger is Trigger.RANK_FAILED]
        if failing and (ended is None or failing[0] <= ended):
            # Ranks of a script fail because of the signal, and the run ends in any case.
            assert states[-1] is AttemptState.FAILED or AttemptState.INTERRUPTING in states[: failing[0] + 1], (
                f"a failure was lost in {triggers}"
            )
        if AttemptState.STOPPING in states:
            assert states[-1] in (AttemptState.STOPPING, AttemptState.SUCCEEDED, AttemptState.FAILED), triggers
        if AttemptState.GROWN in states and Trigger.PREEMPTION_REQUESTED in triggers:
            assert states.index(AttemptState.GROWN) <= triggers.index(Trigger.PREEMPTION_REQUESTED), triggers


def test_every_state_can_be_reached_and_can_end() -> None:
    reached, ends = {AttemptState.RUNNING}, set(FINAL)
    for _ in AttemptState:
        reached |= {after for state in reached for after in ATTEMPT_TRANSITIONS.get(state, {}).values()}
        ends |= {state for state, following in ATTEMPT_TRANSITIONS.items() if ends & set(following.values())}
    assert reached == ends == set(AttemptState)


def test_final_states_have_no_row_and_all_others_have_one() -> None:
    assert set(ATTEMPT_TRANSITIONS) == set(AttemptState) - FINAL
    assert {state for state in AttemptState if state.is_active} < set(ATTEMPT_TRANSITIONS)


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (PhaseEntered(0, RankState.SETTING_UP, 0.0), RankState.SETTING_UP),
        (Returned(0, None), RankState.FINISHED),
        (Failed(0, 0.0, RankState.TRAINING, ValueError()), RankState.FAILED),
        (Exited(0, 1, ""), RankState.LOST),
    ],
)
def test_final_rank_state_does_not_change(event: PhaseEntered, state: RankState) -> None:
    ended = {RankState.FINISHED, RankState.FAILED, RankState.LOST}
    for before in RankState:
        assert next_rank_state(before, event) is (before if before in ended else state)


def test_description_for_users_depends_on_the_state() -> None:
    assert RankState.SETTING_UP.describe("torch") == "setting up torch"
    assert RankState.TRAINING.describe("torch") == "running the train function"
    assert all("{" not in state.describe("torch") for state in RankState)
