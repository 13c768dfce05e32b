"""The conformance kit for backends rejects broken backends, with a message that names the mistake."""

import pytest

from drivetrain_testing import BackendConformance
from tests.kits.running import Case, run_cases
from tests.kits.sound_backend import ConfigOf, SoundBackend

BROKEN = {
    ("TestSwallowsExceptions", "test_exception_in_the_train_function_surfaces[local]"): "session() swallows exceptions",
    ("TestStaysInItsGroup", "test_next_run_on_the_same_workers_trains[local]"): (
        "failed while setting up sound: RuntimeError: this process is in a group already"
    ),
    ("TestStaysInItsGroup", "test_session_in_the_driver_process_leaves_nothing[local]"): "the second run in the same",
    ("TestLeavesVariable", "test_session_leaves_nothing_in_the_workers[local-1]"): (
        "session() has left on rank 0: the environment variable BROKEN_PORT"
    ),
    ("TestLeavesVariableAfterException", "test_session_in_the_driver_process_leaves_nothing[local]"): (
        "after the train function had raised an exception, the process still had the environment variable BROKEN_PORT"
    ),
    ("TestLeavesThread", "test_session_leaves_nothing_in_the_workers[local-1]"): "the thread 'broken sender'",
    ("TestLeavesSocketAfterException", "test_session_in_the_driver_process_leaves_nothing[local]"): (
        "after the train function had raised an exception, the process still had 1 open socket"
    ),
    ("TestLeavesThreadOfConstructor", "test_close_after_a_failed_rendezvous_leaves_nothing"): (
        "close() has left the thread 'drivetrain-broken'"
    ),
    ("TestLeavesThreadInDriver", "test_close_leaves_nothing_in_the_driver[local-1]"): (
        "rendezvous() and close() have left in the driver: the thread 'broken tracker'"
    ),
    ("TestLeavesProcessAfterFailure", "test_close_after_a_failed_rendezvous_leaves_nothing"): (
        "after a failed rendezvous(), close() has left the child process"
    ),
    ("TestReturnsOneMappingTooFew", "test_train_function_runs_on_every_rank_on_the_main_thread[local-2]"): (
        "expected 2 mappings, one per rank, got 1"
    ),
    ("TestReturnsNumbers", "test_rendezvous_returns_mappings_of_strings[local-1]"): (
        "failed in rendezvous (rank 0): expected a mapping from names to strings, got {'port': 1234}"
    ),
    ("TestMisspellsRankEnvironment", "test_names_of_optional_methods_are_spelled_correctly"): (
        "MisspellsRankEnvironment.rank_enviroment() is never called. Did you mean rank_environment()?"
    ),
    ("TestNeedsTwoWorkers", "test_train_function_runs_on_every_rank_on_the_main_thread[local-1]"): (
        "failed in rendezvous: IndexError"
    ),
    ("TestImportsFramework", "test_config_does_not_import_the_framework"): "unpickling the config imports wave",
    ("TestConfigCannotBePickled", "test_config_and_backend_can_be_pickled"): (
        "config: expected an object that can be pickled"
    ),
    ("TestClassifyRaises", "test_classify_returns_none_for_exceptions_of_others"): (
        "classify(an unknown exception): expected None, but it raised ValueError"
    ),
    ("TestClassifiesEverything", "test_classify_returns_none_for_exceptions_of_others"): (
        "expected None for an unknown exception, got <FailureKind.OUT_OF_MEMORY"
    ),
    ("TestYieldsTwice", "test_train_function_runs_on_every_rank_on_the_main_thread[local-1]"): (
        "RuntimeError: generator didn't stop"
    ),
    ("TestNeverYields", "test_train_function_runs_on_every_rank_on_the_main_thread[local-1]"): (
        "failed while setting up sound: RuntimeError: generator didn't yield"
    ),
    ("TestMisspelledCreate", "test_config_creates_backends"): "expected a method create() that returns the backend",
    ("TestClosesOnce", "test_close_after_a_failed_rendezvous_leaves_nothing"): "close(): expected nothing to happen",
    ("TestValidateReturnsBool", "test_optional_methods_return_values_of_the_right_types"): (
        "validate(): expected None or a ConfigurationError, got True"
    ),
    ("TestEnvironmentHasNumbers", "test_optional_methods_return_values_of_the_right_types"): (
        "environment: expected strings as values, got BROKEN_THREADS=4"
    ),
    ("TestOneRunPerDriver", "test_two_runs_of_one_driver_train_at_the_same_time[local]"): "the port is in use",
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, str]:
    return run_cases("broken_backends", BROKEN, tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case[0])
def test_broken_backend_is_rejected_with_its_mistake(failures: dict[Case, str], case: Case) -> None:
    assert BROKEN[case] in failures.get(case, "the test passed")


class TestSoundBackend(BackendConformance):
    config = ConfigOf(kind=SoundBackend)
