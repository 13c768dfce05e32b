import sys
from pathlib import Path

import pytest

import drivetrain
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import in_this_process, once_on_ray, with_processes


def talk() -> None:
    rank = drivetrain.get_context().get_world_rank()
    print(f"rank {rank} prints")
    print(f"rank {rank} complains", file=sys.stderr)
    sys.stdout.write(f"rank {rank} ends without a newline")


LINES = ("prints", "complains", "ends without a newline")


@with_processes
def test_output_of_each_rank_is_in_its_log(runtime: RuntimeUnderTest) -> None:
    result = runtime.fit(talk)

    for rank in range(2):
        log = Path(result.path, "logs", f"rank_{rank}.log").read_text()
        assert sorted(log.splitlines()) == sorted(f"rank {rank} {line}" for line in LINES)


@with_processes
def test_output_of_rank_0_is_shown_in_whole_lines_with_its_rank(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime.fit(talk)

    shown = capfd.readouterr().out.splitlines()
    assert sorted(shown) == sorted(f"[rank 0] rank 0 {line}" for line in LINES)


@with_processes
@pytest.mark.parametrize(("shown_ranks", "expected"), once_on_ray(("all", {0, 1}), ("rank0", {0}), ("none", set())))
def test_output_of_the_configured_ranks_is_shown(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str], shown_ranks: str, expected: set[int]
) -> None:
    runtime.fit(talk, worker_output=shown_ranks, log_to_file=False)

    shown, errors = capfd.readouterr()
    assert sorted(shown.splitlines()) == sorted(
        f"[rank {rank}] rank {rank} {line}" for rank in expected for line in LINES
    )
    assert "rank 0" not in errors
    assert "rank 1" not in errors
    assert not (runtime.storage_path / "run" / "logs").exists()


@in_this_process
def test_output_of_this_process_is_not_redirected(runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    runtime.fit(talk)

    captured = capfd.readouterr()
    assert captured.out == "rank 0 prints\nrank 0 ends without a newline"
    assert captured.err == "rank 0 complains\n"


def test_quiet_run_prints_nothing(runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        drivetrain.report({"step": 0})

    runtime.fit(train, verbose=0)

    assert capfd.readouterr() == ("", "")


def test_run_prints_its_directory_and_outcome_on_standard_error(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        drivetrain.report({"loss": 0.25})

    result = runtime.fit(train, verbose=1)

    output, errors = capfd.readouterr()
    assert output == ""
    first, *_, last = errors.splitlines()
    assert first == f"run directory: {result.path}"
    assert last.startswith("finished after ")
    assert "loss 0.25" in last
