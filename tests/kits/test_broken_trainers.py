"""The conformance kit for trainers rejects broken trainers, with a message that names the mistake."""

import pytest

from tests.kits.running import Case, run_cases

BROKEN = {
    ("TestRestoreLosesTheConfig", "test_restored_trainer_has_the_same_settings"): (
        "restore(): expected train_loop_config {'loss': 0.5}, got {}"
    ),
    ("TestRestoreReturnsTheBaseClass", "test_restore_returns_a_trainer_of_the_class"): (
        "restore(): expected RestoreReturnsTheBaseClass, got <drivetrain._driver.trainer.DataParallelTrainer"
    ),
    ("TestRestoreStartsAnotherRun", "test_restored_trainer_continues_the_run"): "expected the run to continue in",
    ("TestRestoreIgnoresSubclasses", "test_subclass_with_another_first_parameter_trains"): (
        "Renamed.restore(): expected that class"
    ),
    ("TestIgnoresUnknownArguments", "test_unknown_argument_is_refused"): (
        "IgnoresUnknownArguments({'no_such_argument': 1}): expected a TypeError or ConfigurationError, got none"
    ),
    ("TestReplacesWrongTypes", "test_argument_of_a_wrong_type_is_refused"): (
        "ReplacesWrongTypes({'scaling_config': 3.5}): expected a TypeError or ConfigurationError, got none"
    ),
    ("TestHoldsALock", "test_trainer_can_be_pickled"): "expected a trainer that can be pickled, got TypeError",
    ("TestLosesArgumentsInNew", "test_vary_returns_a_copy_with_changes"): "its constructor arguments were not stored",
    ("TestVaryIgnoresChanges", "test_vary_returns_a_copy_with_changes"): "vary(): expected num_workers=1, got 0",
    ("TestUnregistered", "test_entry_point_refers_to_the_class"): "no trainer 'unregistered' is installed",
    ("TestNeverReports", "test_subclass_with_another_first_parameter_trains"): (
        "expected the training to report at least once"
    ),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, str]:
    return run_cases("broken_trainers", BROKEN, tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case[0])
def test_broken_trainer_is_rejected_with_its_mistake(failures: dict[Case, str], case: Case) -> None:
    assert BROKEN[case] in failures.get(case, "the test passed")
