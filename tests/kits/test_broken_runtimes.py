"""The conformance kit for runtimes rejects broken runtimes, with a message that names the mistake."""

import pytest

from tests.kits.running import Case, run_cases

BROKEN = {
    ("TestRunsOnAnotherThread", "test_train_function_runs_on_the_main_thread"): (
        "rank 0: expected the main thread of the process"
    ),
    ("TestLosesReportsOfRank1", "test_reports_of_all_ranks_arrive_in_their_order"): (
        "expected the reports [1, 2, 3] of rank 1, got []"
    ),
    ("TestIgnoresKilledRanks", "test_killed_rank_is_the_root_cause"): "expected the killed rank 1, got: ",
    ("TestClaimsExitCodes", "test_exit_codes_are_reported"): "expected SIGKILL in the message of a killed rank",
    ("TestLeavesProcesses", "test_no_process_is_left_after_a_success"): (
        "expected no process to be left after a success, got ["
    ),
    ("TestAssignsLocalRankTwice", "test_workers_are_described_with_their_ranks"): (
        "expected a local rank per worker of a node, got [(0, 0)]"
    ),
    ("TestAssignsRankTwice", "test_workers_are_described_with_their_ranks"): (
        "expected 2 workers in the order of their ranks, got 2 with the ranks [0, 0]"
    ),
    ("TestStartsOneTooMany", "test_workers_are_described_with_their_ranks"): (
        "expected 2 workers in the order of their ranks, got 3 with the ranks [0, 1, 2]"
    ),
    ("TestDoesNotSetRank", "test_workers_have_the_variables_of_their_ranks_and_of_the_backend"): (
        "rank 0: expected the variable RANK=0, got None"
    ),
    ("TestIgnoresEnvironment", "test_workers_have_the_variables_of_their_ranks_and_of_the_backend"): (
        "expected the variable DRIVETRAIN_KIT_OF_RUN=of the run, got None"
    ),
    ("TestReturnsResultsInReverse", "test_group_calls_functions_on_the_workers"): (
        "run(): expected one result per rank, got ['1 of 2', '0 of 2']"
    ),
    ("TestClaimsProcesses", "test_each_rank_has_its_own_process"): ('expected 0 or 1 with runtime="inprocess", got 2'),
    ("TestClaimsStacks", "test_hang_is_reported_with_the_stacks_of_all_ranks"): (
        "expected the stacks of 2 ranks, got 0"
    ),
    ("TestClaimsOutput", "test_output_of_each_rank_is_in_its_log"): "rank_0.log: expected",
    ("TestReusesProcesses", "test_second_run_of_one_driver_starts_in_a_clean_state"): (
        "expected new processes in the first run, got used ones"
    ),
    (
        "TestClaimsElastic",
        "test_elastic_run_grows",
    ): "expected 2 workers in the order of their ranks, got 1 with the ranks [0]",
    ("TestWithoutName", "test_runtime_has_a_name_and_accepts_workers"): "WithoutName.name: expected the runtime's name",
    ("TestRoomReturnsNone", "test_runtime_has_a_name_and_accepts_workers"): (
        "room(): expected a number of workers, got None"
    ),
    ("TestLaunchIsNoContextManager", "test_reports_of_all_ranks_arrive_in_their_order"): (
        "failed in launch: expected a context manager, got <generator object"
    ),
    ("TestStartsAtMostTwo", "test_starts_as_many_workers_as_requested"): (
        "expected 3 workers in the order of their ranks, got 2 with the ranks [0, 1]"
    ),
    ("TestRoomWithoutRunning", "test_starts_as_many_workers_as_requested"): (
        "room(): expected a number that includes the 3 running workers, got "
    ),
    ("TestShowsItsToken", "test_token_is_not_on_a_command_line"): "expected no token on a command line",
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, str]:
    return run_cases("broken_runtimes", BROKEN, tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case[0])
def test_broken_runtime_is_rejected_with_its_mistake(failures: dict[Case, str], case: Case) -> None:
    assert BROKEN[case] in failures.get(case, "the test passed")
