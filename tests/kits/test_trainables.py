"""The conformance kit for trainables: a small one passes; broken ones are rejected by name of the mistake."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain_testing import TrainableConformance
from tests.core.conftest import Install
from tests.kits.rejecting import rejection

TRAINABLE = """
def make(trainer, *, argument=None, autoscaling=False):
    def trainable(config):
        changes = config if argument is None else {argument: config}
        return trainer.vary(changes).fit().metrics
    return trainable
"""

STARTS_NOTHING = "test_returns_a_trainable_and_starts_nothing"
MERGES = "test_trial_merges_its_config_into_the_arguments_of_the_trainer"
FAILS = "test_trial_reports_its_failure"
BROKEN = {
    "returns nothing": (
        STARTS_NOTHING,
        "def make(trainer, **options): ...",
        "that can be called with a config, got None",
    ),
    "runs at once": (
        STARTS_NOTHING,
        TRAINABLE.replace("    def trainable", "    trainer.fit()\n    def trainable"),
        "expected that no run is started before the trials, got DataParallelTrainer_",
    ),
    "changes the trainer": (
        STARTS_NOTHING,
        TRAINABLE.replace("    def trainable", "    trainer.given['train_loop_config'].clear()\n    def trainable"),
        "the arguments of the trainer afterwards: expected",
    ),
    "has no options": (STARTS_NOTHING, "def make(trainer): ...", "with the parameters (trainer, *, argument, autosc"),
    "ignores the config": (
        MERGES,
        TRAINABLE.replace("(changes)", "({})"),
        "that the trial changes: expected 0.5, got 0.1",
    ),
    "replaces the config": (MERGES, TRAINABLE.replace("(changes)", "({}, **changes)"), "KeyError: 'steps'"),
    "ignores the argument": (
        "test_config_of_a_trial_can_be_one_argument",
        TRAINABLE.replace("config if argument is None else {argument: config}", "config"),
        "arguments (backend_config, dataset_config",
    ),
    "hides a failure": (FAILS, TRAINABLE.replace("fit()", "fit(raise_on_failure=False)"), "DID NOT RAISE"),
    "drops unknown arguments": (
        "test_trial_rejects_an_unknown_argument",
        TRAINABLE.replace(
            "(changes)", "({name: changes[name] for name in changes if name in trainer.known_arguments})"
        ),
        "DID NOT RAISE",
    ),
}


def run_trial(trainable: Any, config: dict[str, Any], directory: Path) -> Any:
    return trainable(config)


@pytest.mark.parametrize("test", [name for name in vars(TrainableConformance) if name.startswith("test_")])
def test_small_trainable_passes(install: Install, test: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    install("in-turn", "in_turn", TRAINABLE, {"drivetrain.trainables": {"in-turn": "in_turn:make"}})
    methods = {"name": "in-turn", "run_trial": staticmethod(run_trial)}
    kit = type("TestInTurn", (TrainableConformance,), methods)
    getattr(kit(), test)(tmp_path_factory.mktemp("trial"))


@pytest.mark.parametrize(
    ("number", "test", "source", "message"),
    [(number, *case) for number, case in enumerate(BROKEN.values())],
    ids=BROKEN,
)
def test_broken_trainable_is_rejected(
    install: Install, number: int, test: str, source: str, message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    name = f"trials_{number}"
    install(f"{name}-dist", name, source, {"drivetrain.trainables": {name: f"{name}:make"}})
    (tmp_path / "kit").mkdir()
    parameters = {"tmp_path": tmp_path / "kit"}
    message_of_kit = rejection(
        request, TrainableConformance, test, parameters, name=name, run_trial=staticmethod(run_trial)
    )
    assert message in message_of_kit


def test_class_without_a_method_that_runs_a_trial_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a method run_trial"):
        type("TestNothing", (TrainableConformance,), {"name": "x"})
